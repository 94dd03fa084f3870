"""Text work on LaTeX answers: the last \\boxed{...}, one spelling for many, splitting at the outermost level.

Every function is linear in the length of its input (or bounded by MAX_ANSWER_CHARS) and raises nothing.
"""

from __future__ import annotations

import re

MAX_ANSWER_CHARS = 1000  # a longer answer is compared as it is written

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_OPEN, _CLOSE = "([{", ")]}"


def last_boxed(text: str) -> str | None:
    """Content of the last \\boxed{...} (or \\fbox, or `\\boxed 5`) with balanced braces; None without one.

    Of boxes in boxes it is the outermost: \\boxed{5+\\boxed{1}} says 6. A last box that is never closed gives None: the
    response was cut off in the middle of its answer.
    """
    last = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if last < 0:
        return None
    match = _BOX.match(text, last)
    assert match is not None
    start = match.end()
    if start >= len(text):
        return None
    if text[start] != "{":
        return re.split(r"[\s$]", text[start:], maxsplit=1)[0] or None
    end = closing_brace(text, start)
    if end is None:
        return None
    content, box, opened = text[start + 1 : end], text[last : end + 1], []
    for found in _BOX_OR_BRACE.finditer(text):
        if found[0] == "}" and opened:
            begin = opened.pop()
            around = len(begin[0]) > 1 and begin.end() <= last and end < found.start()
            if around and found.start() - begin.end() <= MAX_ANSWER_CHARS:  # the outermost is closed last
                inside = text[begin.end() : found.start()]
                content = content if inside.strip() == box else inside
                box = text[begin.start() : found.end()]
        elif found[0][-1] == "{" != found[0][1:]:
            opened.append(found)
    return content


def closing_brace(text: str, start: int) -> int | None:
    """Position of the brace that closes the one at `start`, or None. Escaped braces do not count."""
    depth, position = 0, start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return position
        position += 1
    return None


def split_top_level(text: str, separators: str = ",") -> list[str]:
    """Cut at separators that stand outside all brackets, braces included."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        char = text[position]
        if char == "\\" and text[position + 1 : position + 2] not in ("{", "}"):
            position += 2
            continue
        if char == "\\":  # \{ and \} are brackets too
            position += 1
            char = text[position]
        if char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char in separators and depth == 0:
            parts.append(text[start:position])
            start = position + 1
        position += 1
    return [*parts, text[start:]]


_UNICODE = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\u2014", "-"),
        **dict.fromkeys("\u00d7\u22c5\u00b7", "*"),
        **dict.fromkeys("\u00f7\u2044", "/"),
        **dict.fromkeys("\u2009\u00a0\u202f", " "),
        **{"\uff08": "(", "\uff09": ")", "\u00a2": " cents", "\u221b": r"\sqrt[3] "},
        **{"\u03c0": r"\pi ", "\u221e": r"\infty ", "\u221a": r"\sqrt ", "\u00b0": r"^\circ ", "\u2248": r"\approx "},
        **{"\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u2205": r"\emptyset ", "\u211d": r"\mathbb{R}"},
        **{"\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b1": r"\pm ", "\u2016": "|", "\u2032": "'"},
        **{
            "\u03b1": r"\alpha ",
            "\u03b2": r"\beta ",
            "\u03b8": r"\theta ",
            "\u00b2": "^2",
            "\u00b3": "^3",
            "\uff0c": ",",
        },
        **{"\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}"},
        **{"\u2153": r"\frac{1}{3}", "\u2154": r"\frac{2}{3}"},
    }
)
# {x | x > 3} and {x \in R : x > 3}: the variable, then what is said of it, which must name it and be a relation
_SET_BUILDER = (
    r"^\\\{\s*([a-z])\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?[|:]"
    r"(?=[^|:]*(?<![A-Za-z\\])\1(?![A-Za-z]))(?=[^|:]*(?:[<>=]|\\[lg]e ))([^|:]*)\\\}$"
)
# (pattern, replacement), in order
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|Biggl|Biggr|big|Big|bigg|Bigg)(?![A-Za-z])\s*\.?", ""),
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|strut|bf(?!\s*\{))(?![A-Za-z])(?:\{\})?", ""),
        (r"(?<=\d),\\!\s*(?=\d{3})", ""),
        (r"\{,\}", ","),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;: >]|\\(?:quad|qquad|thinspace|enspace)(?![A-Za-z])|(?<=[^\s~])~(?=[^\s~])", " "),
        (r"\\(?:text|mathrm|mbox)\s*\{[\s~]*\}", " "),
        (r"\\(?:boxed|fbox)\s*(?=\{)", ""),
        (r"(\.\d{6,})\s*(?:\.\.\.|\u2026|\\[lc]?dots)$", r"\1"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\(?:leqslant|leq|le)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geqslant|geq|ge)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:neq|ne)(?![A-Za-z])|!=", r"\\ne "),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])|\*(?!\*)", "*"),
        (r"\*\*", "^"),
        (r"(\^-?\d+) (?=\d)", r"\1*"),  # 2^6 3^5
        (r"\\div(?![A-Za-z])", "/"),
        (r"(^|(?<!\\)\{)([^{}\\=]+)\\over(?![A-Za-z])([^{}\\=]+)(?=\}|$)", r"\1\\frac{\2}{\3}"),
        (r"(^|(?<!\\)\{)([^{}\\=]+)\\choose(?![A-Za-z])([^{}\\=]+)(?=\}|$)", r"\1\\binom{\2}{\3}"),
        (r"\\text\s*\{\s*\\?%\s*\}", r"\%"),
        (r"^([-\d.,]+)\s*(\\\$|\u20ac|\u00a3)$", r"\2\1"),
        (r"(^|[(\[,=])\s*\+\s*(?=\\infty)", r"\1"),
        (_SET_BUILDER, r"\2"),
        (r"\\(?:varnothing|empty)(?![A-Za-z])", r"\\emptyset "),
        (r"\binfinity\b|(?<!\\)\boo\b", r"\\infty "),
        (r"\^\s*\{\s*(\\circ|\\prime|.)\s*\}", r"^\1"),
        (r"\\(?:degree|degrees)(?![A-Za-z])", r"^\\circ "),
        (r"_\s*\{\s*(\w+)\s*\}", r"_{\1}"),
        (r"([\d)])_(\d)", r"\1_{\2}"),
        (r"_(\d+)(?=\s)", r"_{\1}"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
        (r"\\pmod\s*(\d+)", r"\\pmod{\1}"),
        (r"\.(\d*)\\(?:overline|bar)\s*\{?\s*(\d+)\s*\}?", r".\1\\overline{\2}"),
        (r"\\(?:text|textrm|mathrm|rm)\s*\{\s*(i|e|and|or)\s*\}", r" \1 "),
        (r"(?<=[\d)\]}])\s*,?\s*\band\b\s*(?=[-\\\d(\[{a-z])", ","),
        (r"(?<=[\d)\]}])\s*,?\s*\bor\b\s*(?=[-\\\d(\[{a-z])", ";"),
    ]
]
_DOLLAR = re.compile(r"(?<!\\)\$")
_LEADING = re.compile(r"^(?:\\(?:displaystyle|textstyle|therefore|q?quad)(?![A-Za-z])(?:\{\})?|\\[,;: !]|\s)+")
_TRAILING = re.compile(  # but no dots that stand for more
    r"(?:\\?[,;:]|\\!|\\+(?=\s*$)|\\q?quad|\s|(?<!\.)\.{1,2}(?=[\s,;:]*$))+$"
)
_LEAD_IN = re.compile(
    r"^(?P<command>\\(?:text|textbf|mathrm|mbox)\s*\{)?\s*(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+)?"
    r"answer(?:\s+is)?(?(command)\s*:?\s*\}|(?:(?<=is)\s|\s*:))\s*",
    re.IGNORECASE,
)
_DELIMITERS = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`")]


def normalise(answer: str) -> str:
    """One spelling for many: what people and models write differently without meaning different things.

    Delimiters, spacing commands, \\left and \\right, \\dfrac, unicode signs, a final full stop ... White space is kept
    where it may matter (between digits, around text); see `squeeze`.
    """
    text = strip_delimiters(answer.translate(_UNICODE))
    if len(_DOLLAR.findall(text)) % 2 == 0:  # $8$,$4$ and 20 $cm^2$: formulas inside an answer
        text = _DOLLAR.sub("", text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return re.sub(r"\s+", " ", text).strip()


def strip_delimiters(answer: str) -> str:
    """Strip white space, $ .. $, \\( .. \\), ** .. **, an outer \\boxed{..} and a final full stop from an answer."""
    text, before = answer.strip(), None
    while text != before:
        before = text
        text = _LEAD_IN.sub("", _LEADING.sub("", _TRAILING.sub("", text)))
        for left, right in _DELIMITERS:
            if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
                inner = text[len(left) : -len(right)]
                text = inner.strip() if left not in inner else text
        start = box.end() if (box := _BOX.match(text)) else 0
        if text.startswith("{", start) and closing_brace(text, start) == len(text) - 1:
            text = text[start + 1 : -1].strip()
    return text


_TEXT_COMMANDS = "text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf)|boldsymbol|bm|mbox|operatorname|rm|bf"
_TEXT = re.compile(rf"\\(?:{_TEXT_COMMANDS})\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
_SPACE_THAT_MATTERS = re.compile(
    r"(?<=[0-9A-Za-z]) (?=[0-9])|(?<=[A-Za-z]{2}) (?=[A-Za-z]{2})|(\\[A-Za-z]+) (?=[A-Za-z])"
)


def plain_text(text: str) -> str:
    """Replace \\text{...} and its relatives by their content."""
    return _TEXT.sub(r" \1 ", text)


def squeeze(text: str) -> str:
    """Remove white space, but for the spaces that keep two numbers or two words apart."""
    text = re.sub(r"\s+", " ", text.strip())
    marked = _SPACE_THAT_MATTERS.sub(lambda match: (match[1] or "") + "\0", text)
    return marked.replace(" ", "").replace("\0", " ")
