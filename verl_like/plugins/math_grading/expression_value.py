"""Values of expressions: compare two syntax trees of `expression.py`.

Rational arithmetic is exact; everything else is computed to 60 digits with mpmath. Expressions with variables are
compared at a few fixed pseudo-random rational points (identity testing: J. T. Schwartz 1980, R. Zippel 1979).
Exponents, factorials and magnitudes are bounded, so that nothing takes long: beyond the bounds the answer is unknown.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from fractions import Fraction
from math import comb, factorial
from typing import Any

from verl_like.plugins.math_grading.expression import Node, UnknownExpression, symbols

_MAX_EXPONENT = 2000
_MAX_BITS = 20_000
_MAX_FACTORIAL = 300
_DIGITS = 60  # of the arithmetic that is not rational
_TOLERANCE_DIGITS = 45
_POINTS = 4  # the first half has positive values only


def evaluate(node: Node, point: dict[str, Fraction]) -> Any:
    """Value of a tree: a Fraction where it is rational, otherwise an mpmath number.

    Raises UnknownExpression if undefined.
    """
    try:
        with _mpmath().workdps(_DIGITS):
            return _value(node, point)
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        raise UnknownExpression(str(error)) from error


def rational(node: Node) -> Fraction | None:
    """The exact value of an expression without variables, or None if it is not known to be rational."""
    value = _constant(node)
    return value if isinstance(value, Fraction) else None


def real_value(node: Node) -> Any:
    """The value of an expression without variables: a Fraction, or, of an irrational real number, 30 of its digits as
    one; None if it is not real or unknown."""
    value = _constant(node)
    if value is None or isinstance(value, Fraction):
        return value
    mp = _mpmath()
    with mp.workdps(_DIGITS):
        if mp.im(value) != 0:
            return None
        return Fraction(mp.nstr(mp.re(value), 30))


def _constant(node: Node) -> Any:
    """Evaluate an expression without variables; None for one with variables, or of unknown value."""
    try:
        return None if symbols(node) else evaluate(node, {})
    except UnknownExpression:
        return None


def same(left: Node, right: Node) -> bool | None:
    """Check that two trees have the same value everywhere. None: unknown."""
    if left == right:
        return True
    try:
        verdicts = [_close(evaluate(left, point), evaluate(right, point)) for point in _points(left, right)]
    except UnknownExpression:
        return None
    if len(verdicts) > 1 and all(verdicts[: _POINTS // 2]) and not all(verdicts):
        return None  # equal for positive values only, as ln(x^2) and 2 ln(x): not ours to decide
    return all(verdicts)


def proportional(left: Node, right: Node) -> bool | None:
    """Check that left = c * right with a constant c other than 0: then `left = 0` and `right = 0` are one equation."""
    try:
        ratios = []
        for point in _points(left, right):
            over, under = evaluate(left, point), evaluate(right, point)
            if over == 0 or under == 0:
                return None
            with _mpmath().workdps(_DIGITS):
                ratios.append(_OPERATIONS["div"](over, under))
    except (UnknownExpression, ZeroDivisionError):
        return None
    return len(ratios) > 1 and all(_close(ratio, ratios[0]) for ratio in ratios)


def close_to(node: Node, value: Fraction, tolerance: Fraction) -> bool | None:
    """Check that an expression without variables is real and within `tolerance` of `value`. None: unknown."""
    if symbols(node):
        return None
    try:
        found = evaluate(node, {})
    except UnknownExpression:
        return None
    if isinstance(found, Fraction):
        return abs(found - value) <= tolerance
    mp = _mpmath()
    with mp.workdps(_DIGITS):
        return bool(
            abs(found - mp.mpf(value.numerator) / value.denominator)
            <= mp.mpf(tolerance.numerator) / tolerance.denominator
        )


def _points(left: Node, right: Node) -> Iterator[dict[str, Fraction]]:
    names = sorted(symbols(left) | symbols(right))
    for number in range(_POINTS if names else 1):
        point = {}
        for name in names:
            draw = random.Random(f"{name}:{number}")
            sign = -1 if number >= _POINTS // 2 and draw.random() < 0.6 else 1
            point[name] = sign * Fraction(draw.randint(40, 260), 97)
        yield point


def _close(left: Any, right: Any) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    mp = _mpmath()
    with mp.workdps(_DIGITS):
        left, right = _mp(left), _mp(right)
        scale = max(abs(left), abs(right), mp.mpf(10) ** -20)
        return bool(abs(left - right) <= scale * mp.mpf(10) ** -_TOLERANCE_DIGITS)


@functools.cache
def _mpmath() -> Any:
    import mpmath

    return mpmath.mp


def _mp(value: Any) -> Any:
    if isinstance(value, Fraction):
        return _mpmath().mpf(value.numerator) / value.denominator
    return value


def _value(node: Node, point: dict[str, Fraction]) -> Any:
    kind = node[0]
    if kind == "num":
        return node[1]
    if kind == "sym":
        return point[node[1]]
    if kind == "const":
        mp = _mpmath()
        return {"pi": mp.pi, "e": mp.e, "i": mp.mpc(0, 1)}[node[1]] * 1
    if kind == "call":
        return _call(node[1], _mp(_value(node[2], point)))
    return _bounded(_OPERATIONS[kind](*(_value(child, point) for child in node[1:])))


def _bounded(value: Any) -> Any:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
            raise UnknownExpression("number too large")
    elif not _mpmath().isfinite(value) or (value != 0 and abs(_mpmath().mag(value)) > _MAX_BITS):
        raise UnknownExpression("number too large")
    return value


def _both(function: Any) -> Any:
    """A binary operation on two rationals, or on two mpmath numbers."""

    def apply(left: Any, right: Any) -> Any:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return function(left, right)
        return function(_mp(left), _mp(right))

    return apply


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, Fraction) and abs(exponent) > _MAX_EXPONENT:
        raise UnknownExpression("exponent too large")
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        if isinstance(base, Fraction):
            size = max(base.numerator.bit_length(), base.denominator.bit_length())
            if size * abs(exponent) > _MAX_BITS:
                raise UnknownExpression("power too large")
            return base ** int(exponent)
        return base ** int(exponent)
    if abs(_mp(exponent)) > _MAX_EXPONENT:
        raise UnknownExpression("exponent too large")
    return _root_of(base, 1 / exponent) if _is_unit_fraction(exponent) else _mpmath().power(_mp(base), _mp(exponent))


def _is_unit_fraction(value: Any) -> bool:
    return isinstance(value, Fraction) and value.numerator == 1 and value.denominator > 1


def _root_of(radicand: Any, degree: Any) -> Any:
    """The real root of a real number where there is one (also an odd root of a negative one), else the principal."""
    if not (isinstance(degree, Fraction) and degree.denominator == 1 and 1 <= degree <= 100):
        raise UnknownExpression("degree of a root")
    number = int(degree)
    if isinstance(radicand, Fraction):
        exact = _exact_root(radicand, number)
        if exact is not None:
            return exact
    mp, value = _mpmath(), _mp(radicand)
    negative = isinstance(value, mp.mpf) and value < 0
    return (
        -mp.root(-value, number) if negative and number % 2 else mp.root(mp.mpc(value) if negative else value, number)
    )


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    if value < 0:
        return None
    parts = []
    for part in (value.numerator, value.denominator):
        root = int(_mpmath().nint(_mpmath().root(part, degree))) if part.bit_length() < 150 else -1
        if root < 0 or root**degree != part:
            return None
        parts.append(root)
    return Fraction(*parts)


def _factorial(value: Any) -> Fraction:
    if not (isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= _MAX_FACTORIAL):
        raise UnknownExpression("factorial")
    return Fraction(factorial(int(value)))


def _binomial(above: Any, below: Any) -> Fraction:
    for value in (above, below):
        if not (isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= _MAX_FACTORIAL):
            raise UnknownExpression("binomial coefficient")
    return Fraction(comb(int(above), int(below)))


def _call(name: str, argument: Any) -> Any:
    if abs(argument) > 10**30:
        raise UnknownExpression("argument too large")
    mp = _mpmath()
    if name == "exp" and abs(argument) > _MAX_EXPONENT:
        raise UnknownExpression("argument too large")
    if name == "lg":
        return mp.log(argument, 10)
    return _bounded(getattr(mp, {"ln": "log"}.get(name, name))(argument))


_OPERATIONS: dict[str, Any] = {
    "add": _both(lambda a, b: a + b),
    "mul": _both(lambda a, b: a * b),
    "div": _both(lambda a, b: a / b),
    "frac": _both(lambda a, b: a / b),
    "pow": _power,
    "root": _root_of,
    "neg": lambda a: -a,
    "abs": abs,
    "factorial": _factorial,
    "binom": _binomial,
}
