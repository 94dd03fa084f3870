"""A small language of mathematical expressions, LaTeX or plain text: text -> syntax tree.

Made for grading: it takes microseconds where a computer algebra system needs milliseconds, is bounded in length and
depth, and refuses what it does not understand instead of guessing. `expression_value.py` computes with the trees.

Grammar, loosest first; juxtaposition is multiplication:
    sum = [sign] product {(+|-) product};  product = power {(* | / | nothing) power};  power = atom [^ group] [!]
    atom = number | symbol | \\frac{..}{..} | \\sqrt[n]{..} | function argument | ( .. ) | { .. } | | .. |
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import Any

MAX_CHARS = 400
_MAX_DEPTH = 40
_MAX_DIGITS = 60

Node = tuple[Any, ...]


class UnknownExpression(ValueError):
    """Error of a text that is not in the language, or too large to be computed here."""


_FUNCTIONS = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "ln", "log", "exp")},
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan")},
    "lg": "lg",
}
GREEK = re.findall(
    "[A-Za-z]+",
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell",
)
_WORDS = sorted([*_FUNCTIONS, "sqrt", "pi"], key=len, reverse=True)  # known without a backslash
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)|\\(?P<command>[A-Za-z]+)|(?P<word>" + "|".join(_WORDS) + r")(?![a-z])|"
    r"(?P<letter>[A-Za-z]\d*)|(?P<sign>[-+*/^(){}\[\]|!_,]))\s*"
)

_FURTHER = (  # commands of mathematics beyond this language, for `understood`
    "begin cap cdot choose circ cup div emptyset end frac binom ge in infty langle lceil le lfloor mathbb mathbf mp "
    "overline pm rangle rceil rfloor setminus times"
)
_MATHEMATICS = {f"\\{name}" for name in (*_WORDS, *GREEK, *_FURTHER.split())} | {*_WORDS, "pmatrix", "bmatrix", "array"}
_SENSELESS = re.compile(
    r"[\d)\]}]\s*_|(?:[\d)\]}]|\\r(?:floor|ceil|angle))\s*\\\{|\\\}\s*[\d(\[{]"
)  # 5_a, 5\{1\}: math-verify reads a product
_PIECES = re.compile(r"\\?[A-Za-z]+|[^A-Za-z]")


def understood(truth: str, answer: str) -> bool:
    """True for an answer made only of commands, letters and signs of mathematics, or of pieces of the reference.

    Nothing in it then hides a part (\\phantom, \\color), names something else, or speaks in words.
    """
    known = _MATHEMATICS.union(_PIECES.findall(truth))
    letters = {"e", "i"}.union(*_PIECES.sub(lambda piece: "" if piece[0][0] == "\\" else piece[0], truth))
    return not _SENSELESS.search(answer) and all(
        piece in known or piece in "0123456789{}[]()^_+-*/=<>|!,.& \\" or letters.issuperset(piece)
        for piece in _PIECES.findall(answer)
    )


def tokenise(text: str) -> list[tuple[str, str]]:
    """Split a text into (kind, text) of every token. Raises UnknownExpression for anything else."""
    if len(text) > MAX_CHARS:
        raise UnknownExpression("too long")
    tokens: list[tuple[str, str]] = []
    position, text = 0, text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise UnknownExpression(f"unexpected {text[position : position + 10]!r}")
        kind, value = match.lastgroup, match[match.lastgroup]
        if kind == "number" and len(value) > _MAX_DIGITS:
            raise UnknownExpression("number too long")
        tokens.append(("command" if kind == "word" else kind, value))
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        self._tokens = tokenise(text)
        self._at = 0
        self._depth = 0
        self._bars = 0  # open | ... |

    def parse(self) -> Node:
        node = self._sum()
        if self._at != len(self._tokens):
            raise UnknownExpression(f"unexpected {self._tokens[self._at][1]!r}")
        return node

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _next(self) -> tuple[str, str]:
        token = self._peek()
        self._at += 1
        return token

    def _accept(self, sign: str) -> bool:
        if self._peek() == ("sign", sign):
            self._at += 1
            return True
        return False

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            raise UnknownExpression(f"{sign} expected")

    def _sum(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnknownExpression("nested too deeply")
        negative = False
        while self._peek() in (("sign", "-"), ("sign", "+")):
            negative ^= self._next()[1] == "-"
        node = self._product()
        node = ("neg", node) if negative else node
        while self._peek() in (("sign", "+"), ("sign", "-")):
            operator = self._next()[1]
            right = self._signed_product()
            node = ("add", node, right if operator == "+" else ("neg", right))
        self._depth -= 1
        return node

    def _signed_product(self) -> Node:
        if self._accept("-"):
            return ("neg", self._product())
        return self._product()

    def _product(self) -> Node:
        node = self._power()
        while True:
            if self._operator("*", "cdot", "times"):
                node = ("mul", node, self._signed_power())
            elif self._operator("/", "div"):
                node = ("div", node, self._signed_power())
            elif self._starts_factor():
                if self._peek()[0] == "number" and self._tokens[self._at - 1][0] in ("number", "letter"):
                    raise UnknownExpression("a number after a number or a letter")
                node = self._juxtaposed(node)
            else:
                return node

    def _operator(self, *names: str) -> bool:
        kind, value = self._peek()
        if kind in ("sign", "command") and value in names:
            self._at += 1
            return True
        return False

    def _juxtaposed(self, left: Node) -> Node:
        """Multiply `left` by what follows; a whole number before a proper fraction is a mixed number."""
        right = self._power()
        if left[0] == "num" and left[1].denominator == 1 and right[0] == "frac":
            top, bottom = right[1], right[2]
            if top[0] == bottom[0] == "num" and 0 < top[1] < bottom[1]:
                return ("num", left[1] + top[1] / bottom[1])
        return ("mul", left, right)

    def _starts_factor(self) -> bool:
        kind, value = self._peek()
        if kind in ("number", "letter"):
            return True
        if kind == "command":
            return value not in ("cdot", "times", "div")
        return kind == "sign" and (value in "({[" or (value == "|" and not self._bars))

    def _signed_power(self) -> Node:
        if self._accept("-"):
            return ("neg", self._power())
        self._accept("+")
        return self._power()

    def _power(self) -> Node:
        node = self._postfix(self._atom())
        if self._accept("^"):
            return self._postfix(("pow", node, self._script()))
        return node

    def _postfix(self, node: Node) -> Node:
        return ("factorial", node) if self._accept("!") else node

    def _script(self) -> Node:
        """Parse the operand of ^: a group or an atom, with a sign if need be."""
        return ("neg", self._atom()) if self._accept("-") else self._atom()

    def _group(self) -> Node:
        """An argument of \\frac and the like: { .. }, or a single token, of a number its first digit."""
        if self._accept("{"):
            node = self._sum()
            self._expect("}")
            return node
        kind, value = self._peek()
        if len(value) > 1 and value.isascii() and value.isalnum() and kind in ("number", "letter"):
            self._tokens[self._at : self._at + 1] = [(kind, value[0]), ("number", value[1:])]
        return self._atom()

    def _atom(self) -> Node:
        kind, value = self._next()
        if kind == "number":
            return ("num", Fraction(value if not value.startswith(".") else "0" + value))
        if kind == "letter":
            return self._symbol(value)
        if kind == "command":
            return self._command(value)
        closing = {"(": ")", "{": "}", "[": "]"}.get(value)
        if kind == "sign" and closing:
            node = self._sum()
            self._expect(closing)
            return node
        if kind == "sign" and value == "|" and not self._bars:
            self._bars += 1
            node = self._sum()
            self._expect("|")
            self._bars -= 1
            return ("abs", node)
        raise UnknownExpression(f"unexpected {value!r}")

    def _symbol(self, name: str) -> Node:
        """A variable, with its subscript: x_1, x_{1}, and x1."""
        if len(name) > 1 and name[1:].isdigit():
            return ("sym", f"{name[0]}_{name[1:]}")
        if self._accept("_"):
            opened = self._accept("{")
            parts = []
            while (token := self._next())[0] in ("number", "letter"):
                parts.append(token[1])
                if not opened and len(token[1]) == 1:
                    return ("sym", f"{name}_{parts[0]}")
                if not opened:
                    raise UnknownExpression("a subscript of several signs needs braces")
            if not parts or token != ("sign", "}"):
                raise UnknownExpression("subscript")
            return ("sym", f"{name}_{''.join(parts)}")
        return ("const", name) if name in ("e", "i") else ("sym", name)

    def _command(self, name: str) -> Node:
        if name == "pi":
            return ("const", "pi")
        if name in GREEK:
            return self._symbol(name)
        if name in ("frac", "binom"):
            return (name, self._group(), self._group())
        if name == "sqrt":
            return self._root()
        if name in _FUNCTIONS:
            return self._function(_FUNCTIONS[name])
        raise UnknownExpression(f"\\{name}")

    def _root(self) -> Node:
        degree: Node = ("num", Fraction(2))
        if self._accept("["):
            degree = self._sum()
            self._expect("]")
        if self._accept("("):
            node = self._sum()
            self._expect(")")
            return ("root", node, degree)
        return ("root", self._group(), degree)

    def _function(self, name: str) -> Node:
        base: Node | None = None
        if name == "log" and self._accept("_"):
            base = self._group()
        power = self._script() if self._accept("^") else None
        argument = self._argument()
        if power == ("neg", ("num", Fraction(1))) and name in ("sin", "cos", "tan"):
            return ("call", f"a{name}", argument)
        node: Node = ("call", name, argument)
        if base is not None:
            node = ("div", ("call", "ln", argument), ("call", "ln", base))
        return node if power is None else ("pow", node, power)

    def _argument(self) -> Node:
        """Parse a function's argument: ( .. ) or { .. } alone, or the factors up to the next sign or function."""
        if self._peek()[1] in ("(", "{", "["):
            return self._atom()
        node = self._signed_power()
        while self._starts_factor() and self._peek()[1] not in ("(", "[", *_FUNCTIONS):
            node = ("mul", node, self._power())
        return node


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Node | None:
    """The syntax tree, or None if the text is no expression of the language."""
    try:
        return _Parser(text).parse()
    except UnknownExpression:
        return None


def symbols(node: Node) -> set[str]:
    """Names of the variables of a tree."""
    if node[0] == "sym":
        return {node[1]}
    return {name for child in node[1:] if isinstance(child, tuple) for name in symbols(child)}
