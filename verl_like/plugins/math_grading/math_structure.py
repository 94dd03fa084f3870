"""Answers with parts: lists, sets, tuples, intervals, unions, matrices, relations. Each function says None where it is
not in charge, and compares the parts with the function it is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_like.plugins.math_grading import expression, expression_value, intervals, symbolic
from verl_like.plugins.math_grading.latex import plain_text, split_top_level, squeeze

Same = Callable[[str, str], bool]  # (truth, answer) -> equal

_MAX_PARTS = 40
_NAME = (
    rf"(?:(?!(?:not|no|nor|non|or|and|of|per|is)(?![A-Za-z]))[A-Za-z]{{1,3}}|\\(?:{'|'.join(expression.GREEK)})(?![A-Za-z]))"
    r"(?:_\{?\w+\}?|')?(?:\([A-Za-z,]{1,5}\))?"
)
_ASSIGNMENT = re.compile(rf"^({_NAME}|\((?:\s*{_NAME}\s*,)+\s*{_NAME}\s*\))\s*=\s*([^=]+)$", re.DOTALL)
_MEMBER = re.compile(rf"^{_NAME}\s*\\in\s*((?:[(\[R]|\\\{{|\\mathbb|\\emptyset).*)$", re.DOTALL)
# what an answer may say it has found, besides names and expressions: \angle ABC, \text{Area of the base}, \gcd(12,18)
_FOUND = re.compile(
    r"\\(?:angle|measuredangle|triangle|overline|sum|prod|int|lim|gcd|max|min|det|dim|deg|mathbb|mathbf|vec|lfloor|rfloor|"
    rf"lceil|rceil|[lc]?dots|bmod|mod|pmod|binom|to|infty|frac|sqrt|circ|cdot|Pr|{'|'.join(expression.GREEK)})(?![A-Za-z])"
    r"|(?<![A-Za-z\\])(?i:the|of|total|answer|area|volume|perimeter|surface|length|width|height|radius|diameter|distance|"
    r"time|speed|rate|age|cost|price|profit|sum|product|difference|number|probability|ratio|mean|median|average|lcm|gcd|"
    r"value|result|slope|[a-z])(?![A-Za-z])|[A-Z]|[-+*/=\d\s()\[\]{}|!.,^_']",
)
_UNKNOWN = re.compile(
    r"(?<![A-Za-z\\])[A-Za-z]"
    rf"|\\(?:angle|triangle|sum|prod|int|lim|gcd|max|min|det|bmod|Pr|{'|'.join(expression.GREEK)})(?![A-Za-z])"
)
_WORD = re.compile(
    r"(?<![A-Za-z\\])(?!arc|sin|cos|tan|cot|sec|csc|ln|log|exp|pi)(?:(?:or|and|no|nor|not|non)(?![A-Za-z])"
    r"|[a-z]{5,}|[a-z]{2,}\s+(?![-+*/^)\s])\S)"
)
_MULTIPLE = re.compile(rf"^\s*(?:[-+.\d\s]+{_NAME}|{_NAME}\s*[-+*/]\s*[\d.]+|\\frac\{{{_NAME}\}}\{{[\d.]+\}})\s*$")
_RELATION = re.compile(r"\s*(\\le |\\ge |<|>)\s*")
_MIRROR = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_MATRIX = re.compile(r"^\\begin\s*\{([pbvBV]?matrix|array|smallmatrix)\}(?:\{[lcr|]*\})?(.*)\\end\s*\{\1\}$", re.DOTALL)
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])|\\mp(?![A-Za-z])|\+/-|\+-")


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of an answer.

    kind: "set" for {a,b}, "list" for a,b, "tuple" for (a,b) and [a,b).
    """

    kind: str
    elements: list[str]
    brackets: str = ""


def is_name(text: str) -> bool:
    """A variable, or a function of some: x, x_1, f(x), \\theta."""
    return re.fullmatch(_NAME, text.strip()) is not None


def parts_of(text: str) -> Parts | None:
    """The parts of a set, list or tuple; None for a single thing."""
    if text.startswith("\\{") and text.endswith("\\}") and len(text) > 4:
        return Parts("set", _elements(text[2:-2]))
    elements = _elements(text)
    if len(elements) > 1:
        return Parts("list", elements)
    if len(text) > 3 and text[0] in "([" and text[-1] in ")]":
        inner = _elements(text[1:-1])
        if len(inner) > 1:
            return Parts("tuple", inner, text[0] + text[-1])
    return None


def _elements(text: str) -> list[str]:
    return [part.strip() for part in split_top_level(text, ",;")]


def compare_collections(truth: str, answer: str, same: Same) -> bool | None:
    """Sets and bare lists without order, tuples in order and with their brackets."""
    left, right = parts_of(_expand_plus_minus(truth)), parts_of(_expand_plus_minus(answer))
    if left is None and right is None:
        return None
    if left is None or right is None:  # {5} and 5
        many = left or right
        if many is None or many.kind != "set" or len(many.elements) != 1:
            return False
        return same(many.elements[0] if left else truth, many.elements[0] if right else answer)
    if left.kind == right.kind == "tuple":
        alike = left.brackets == right.brackets or len(left.elements) > 2  # of three and more: vectors
        return alike and _in_order(left.elements, right.elements, same)
    if left.kind == "tuple":
        pair = right.kind == "list" and left.brackets == "()" and ";" not in answer  # 2 or 7 is no pair
        return pair and _in_order(left.elements, right.elements, same)
    if right.kind == "tuple":
        return False
    return _same_multiset(left.elements, right.elements, same)


def compare_unions(truth: str, answer: str, same: Same) -> bool | None:
    """A \\cup B, as sets of numbers where the ends are numbers."""
    left, right = intervals.split_union(truth), intervals.split_union(answer)
    if len(left) == len(right) == 1 and "\\mathbb" not in truth + answer:
        return None
    verdict = intervals.same_set(truth, answer)
    if verdict is None and len(left) == len(right) > 1:
        verdict = _same_multiset(left, right, same) or None
    return symbolic.equal(truth, answer) if verdict is None else verdict


def compare_matrices(truth: str, answer: str, same: Same) -> bool | None:
    """Matrices by cell, whatever brackets they have; a determinant is no matrix."""
    left, right = _matrix(truth), _matrix(answer)
    if left is None and right is None:
        return None
    if left is None or right is None or left[0] != right[0]:
        return False
    if [len(row) for row in left[1]] != [len(row) for row in right[1]]:
        return False
    return all(_in_order(row, other, same) for row, other in zip(left[1], right[1], strict=True))


def _matrix(text: str) -> tuple[str, list[list[str]]] | None:
    text = re.sub(r"^[(\[]\s*(\\begin.*\})\s*[)\]]$", r"\1", text)  # brackets around an array
    match = _MATRIX.match(text)
    if match is None:
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[2]) if row.strip()]
    kind = "determinant" if match[1].lower() == "vmatrix" else "matrix"
    return kind, [[cell.strip() for cell in row.split("&")] for row in rows]


def compare_relations(truth: str, answer: str, same: Same) -> bool | None:
    """Assignments (`x = 5` is 5), memberships, equations, inequalities (as intervals)."""
    left, right = _as_set(truth), _as_set(answer)
    if (left, right) != (truth, answer):
        unsolved = any(_RELATION.search(side) for side in (left, right))  # 2x + 1 < 5
        return symbolic.equal(truth, answer) if unsolved else same(left, right)
    if "=" not in truth + answer or any((parts_of(side) or Parts("", [])).kind == "list" for side in (truth, answer)):
        return None  # x=1, y=2 is compared part by part
    named = _ASSIGNMENT.match(truth), _ASSIGNMENT.match(answer)
    if named[0] and named[1] and squeeze(named[0][1]) == squeeze(named[1][1]):
        return same(named[0][2], named[1][2])
    if "=" not in answer:
        return same(named[0][2], answer) if named[0] else None
    if "=" not in truth:  # an assignment, or a derivation: 1 + 1 = 2
        *before, last = split_top_level(answer.replace("==", "="), "=")
        return same(truth, last) and all(_is_found(side, truth) or same(truth, side) for side in before)
    if truth.count("=") == 1:  # y = 2(x+1) - 1 = 2x + 1
        first, *rest = answer.split("=")
        return all(_same_equation(truth, f"{first}={side}") for side in rest)
    return None


def _is_found(side: str, truth: str) -> bool:
    """True where the left side of = names what the answer is, as x, a+b and \\angle ABC do.

    Not so 2+3, which is a number itself (nor (x-1)(x+2) for x^2-1), 2x, which leaves an equation to be
    solved, and words that are not known.
    """
    if is_name(side):
        return True
    balanced = all(side.count(left) == side.count(right) for left, right in ("()", "[]", "{}"))
    begun, ended = side.strip()[:1] not in "-*/.", side.strip()[-1:] not in "-+*/^_."
    if not (balanced and begun and ended) or _MULTIPLE.match(side) or not _UNKNOWN.search(plain_text(side)):
        return False
    tree = expression.parse(squeeze(side))
    if tree is None or _WORD.search(side):
        return not _FOUND.sub("", plain_text(side)).strip()
    symbols, about = expression.symbols(tree), expression.parse(squeeze(truth))
    return bool(symbols) and (about is None or symbols != expression.symbols(about))


def _same_equation(truth: str, answer: str) -> bool:
    """True where two equations are equal up to a constant factor."""
    sides = [expression.parse(side) for side in (*truth.split("="), *answer.split("="))]
    if None in sides:
        return symbolic.equal(truth, answer)
    trees = [("add", left, ("neg", right)) for left, right in (sides[:2], sides[2:])]
    if expression.symbols(trees[0]) != expression.symbols(trees[1]):
        return False
    verdict = expression_value.proportional(trees[0], trees[1])
    return symbolic.equal(truth, answer) if verdict is None else verdict


def _as_set(text: str) -> str:
    """Write `x \\in A` as A; `-2 \\le x < 3` as [-2,3); `x < 1, x > 5` as a union; anything else as it is."""
    member = _MEMBER.match(text)
    if member:
        return member[1]
    found = [part for part in map(_interval_of, _elements(text)) if part is not None]
    if len(found) < len(_elements(text)) or len({name for name, _ in found}) > 1:
        return text
    rays = [interval for _, interval in found]
    return (";" not in text and _between(rays)) or "\\cup ".join(rays)


def _between(found: Sequence[str]) -> str:
    """Write two rays [1,\\infty) and (-\\infty,3) that meet as [1,3); "" for anything else."""
    ends = [part.removesuffix(",\\infty)").removeprefix("(-\\infty,") for part in found]
    between = ",".join(sorted(ends, key=lambda end: end[-1] in ")]"))
    return between if intervals.same_set(between, between) else ""


def _interval_of(text: str) -> tuple[str, str] | None:
    """Read -2 \\le x < 3 as x and [-2,3), x > 1 as x and (1,\\infty). None for anything else."""
    parts = [part.strip() for part in _RELATION.split(text)]
    if len(parts) == 3:
        variable, sign, bound = parts
        if not re.fullmatch(_NAME, variable):
            variable, sign, bound = bound, _MIRROR[sign], variable
        if not re.fullmatch(_NAME, variable) or re.fullmatch(r"[a-zA-Z]", bound) or not bound:
            return None
        closed = "e" in sign
        if sign in ("<", "\\le"):
            return variable, f"(-\\infty,{bound}{']' if closed else ')'}"
        return variable, f"{'[' if closed else '('}{bound},\\infty)"
    if len(parts) == 5 and re.fullmatch(_NAME, parts[2]):
        low, first, _, second, high = parts
        if {first, second} <= {">", "\\ge"}:
            low, first, second, high = high, _MIRROR[second], _MIRROR[first], low
        if {first, second} <= {"<", "\\le"}:
            return parts[2], f"{'[' if 'e' in first else '('}{low},{high}{']' if 'e' in second else ')'}"
    return None


def _expand_plus_minus(text: str) -> str:
    """Expand a \\pm b to the list a+b, a-b; of a list, each element that has one."""
    if not _PLUS_MINUS.search(text):
        return text
    if text.startswith("\\{") and text.endswith("\\}"):
        return f"\\{{{_expand_plus_minus(text[2:-2])}\\}}"
    expanded = []
    for part in _elements(text):
        once = len(_PLUS_MINUS.findall(part)) == 1
        expanded += [_PLUS_MINUS.sub(sign, part) for sign in "+-"] if once else [part]
    return ",".join(expanded)


def _in_order(truth: Sequence[str], answer: Sequence[str], same: Same) -> bool:
    return len(truth) == len(answer) <= _MAX_PARTS and all(map(same, truth, answer))


def _same_multiset(truth: Sequence[str], answer: Sequence[str], same: Same) -> bool:
    if len(truth) != len(answer) or len(truth) > _MAX_PARTS:
        return False
    left = list(truth)
    for element in answer:
        found = next((i for i, other in enumerate(left) if same(other, element)), None)
        if found is None:
            return False
        left.pop(found)
    return True
