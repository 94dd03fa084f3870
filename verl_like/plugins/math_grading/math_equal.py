"""Comparison of two mathematical answers, in the layers below, cheapest first.

1. text: equal after normalisation (`latex.py`); words and multiple-choice letters are decided here for good.
2. structure: lists, sets, tuples, intervals, matrices, relations are compared part by part (`math_structure.py`), and a
   shape that differs is a wrong answer.
3. value: units and percent signs (`units.py`), then exact or 60-digit arithmetic (`expression.py`).
4. math-verify (`symbolic.py`) for what the layers above do not understand.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

from verl_like.plugins.math_grading import expression, expression_value, symbolic
from verl_like.plugins.math_grading.latex import MAX_ANSWER_CHARS, normalise, plain_text, split_top_level, squeeze
from verl_like.plugins.math_grading.math_structure import (
    compare_collections,
    compare_matrices,
    compare_relations,
    compare_unions,
    is_name,
    parts_of,
)
from verl_like.plugins.math_grading.units import Quantity, compatible, says_more_than_the_number, split_unit, words_of

_MAX_NESTING = 6
_ROUNDING_DECIMALS = 6  # a decimal with so many places stands for the number it is the rounding of

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?")
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?!\d|,\d)")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.])([1-9]\d{0,2}(?: \d{3})+)(?!\d)")
_PERIODIC = re.compile(r"(-?)(\d*)\.(\d*)\\overline\{(\d+)\}")
_MIXED = re.compile(r"^(-?\d+) (\d+)/(\d+)$")
_LEADING_ZERO = re.compile(r"(?:^|[\s,(\[{])0\d")
_SIDE_BY_SIDE = re.compile(  # no products: 4 0, x 2, {4}{0}, 4{0}, the footnote 4[1], the link [4](0)
    r"\d \d|(?<![\\A-Za-z])[A-Za-z] \d|(?<![A-Za-z}\]^_])\{[\d.]+\}\{?\d|(?<![\w.^])[\d.]+\{\d"
    r"|(?<!\\sqrt)(?<=.)\[[\d.]+\]|^\[[\d.]+\](?=.)"
)
_BASED = re.compile(r"^\(?(-?[0-9A-Z]+)\)?_\{(\d+)\}$")
_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])")
_QUOTED = re.compile(r"^\s*[\"'`]++(.*?)\.?[\"']+\s*$", re.DOTALL)
_WORDS = re.compile(r"^[A-Za-z][A-Za-z' \-]*$")
_CHOICE = re.compile(r"^\(?\s*([A-Z])\s*[).:]?$")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a comparison, and the layer that decided: text, structure, value or math-verify."""

    same: bool
    layer: str


def equal(truth: str, answer: str) -> bool:
    """Check that `answer` means the same as the reference `truth`."""
    return compare(truth, answer).same


@functools.lru_cache(maxsize=8192)
def compare(truth: str, answer: str) -> Verdict:
    """Compare an answer with the reference, as `equal` does, and name the layer that decided.

    Results are cached: the responses of a group often give the same answer.
    """
    if max(len(truth), len(answer)) > MAX_ANSWER_CHARS:
        return Verdict(truth.strip() == answer.strip(), "text")
    left, right = normalise(truth), normalise(answer)
    if not left or not right:
        return Verdict(False, "text")
    if squeeze(plain_text(left)) == squeeze(plain_text(right)):
        return Verdict(True, "text")
    verdicts = [_compare_approximations(a, b) for a in _readings(left) for b in _readings(right)]
    return next((verdict for verdict in verdicts if verdict.same), verdicts[0])


def _readings(text: str) -> list[str]:
    """The text with 1,234 and 1 234 read as one number, and, where the comma may also part a list, as it is."""
    joined = _THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)
    joined = _SPACED_THOUSANDS.sub(lambda match: match[1].replace(" ", ""), joined)
    joined = _MIXED.sub(r"\1\\frac{\2}{\3}", joined)
    if joined == text:
        return [text]
    before, after = parts_of(text), parts_of(joined)
    if before and before.kind != "list" and (after is None or len(after.elements) < 2):
        return [text]  # (20,100) is a pair
    listed = len(split_top_level(text, ",;")) > 1 or text[:1] in ("(", "[", "\\")
    return [joined, text] if listed and not _LEADING_ZERO.search(text) else [joined]


def _compare_approximations(truth: str, answer: str) -> Verdict:
    """Compare answers such as 2/3 \\approx 0.67: each number the answer gives must be one that the reference gives."""
    truths, answers = _values(truth), _values(answer)
    if len(truths) == len(answers) == 1:
        return _compare(truths[0], answers[0], 0)
    exact = _tree(squeeze(answers[0].rpartition("=")[2]))  # \sqrt{2} \approx 1.41: the second is the first, rounded
    same = all(
        any(_compare(right, given, 0).same for right in truths) or (exact and _is_rounding(given.strip(), exact, 2))
        for given in answers
    )
    return Verdict(same, "structure")


def _values(text: str) -> list[str]:
    """List the values on the sides of \\approx, without the name of what is approximated: x \\approx 11 is 11."""
    values = _APPROXIMATELY.split(text)
    return values[1:] if len(values) > 1 and is_name(values[0]) else values


def _compare(truth: str, answer: str, nesting: int) -> Verdict:
    truth, answer = truth.strip(), answer.strip()

    def same(left: str, right: str) -> bool:
        return _compare(left, right, nesting + 1).same

    if nesting > _MAX_NESTING or not truth or not answer:
        return Verdict(squeeze(truth) == squeeze(answer) != "", "text")
    verdict = _compare_text(truth, answer)
    if verdict is not None:
        return Verdict(verdict, "text")
    for compare_shape in (compare_relations, compare_matrices, compare_unions, compare_collections):
        verdict = compare_shape(truth, answer, same)
        if verdict is not None:
            return Verdict(verdict, "structure")
    return _compare_values(split_unit(truth), split_unit(answer, one_letter=True, known=words_of(truth)))


def _compare_text(truth: str, answer: str) -> bool | None:
    """Words, multiple-choice letters, times and numbers of another base: compared as they are written."""
    left, right = (squeeze(_QUOTED.sub(r"\1", plain_text(side))).removesuffix(".") for side in (truth, answer))
    if left == right:
        return bool(left)
    choices = _CHOICE.match(left), _CHOICE.match(right)
    if choices[0] and choices[1]:
        return choices[0][1] == choices[1][1]
    wrapped = re.match(r"\\(?:text|mathrm|mbox)", truth) is not None
    if _WORDS.match(left) and len(left) > 1 and (wrapped or re.search(r"[A-Za-z]{4}", left)):
        return left.casefold() == right.casefold()
    if ":" in left or ":" in right:
        return False
    based = _BASED.match(left), _BASED.match(right)
    if based[0] or based[1]:  # base ten may be left out
        numbers = [match.groups() if match else (text, "10") for match, text in zip(based, (left, right), strict=True)]
        return numbers[0] == numbers[1]
    return None


def _compare_values(truth: Quantity, answer: Quantity) -> Verdict:
    if not compatible(truth, answer):
        return Verdict(False, "value")
    texts = squeeze(plain_text(truth.value)), squeeze(plain_text(answer.value))
    if texts[0] == texts[1] and truth.percent == answer.percent:
        return Verdict(bool(texts[0]), "text")
    if any(_SIDE_BY_SIDE.search(text) or "\\infty" in text for text in texts):  # nor arithmetic with infinity
        return Verdict(False, "value")
    if any(says_more_than_the_number(plain_text(side.value)) for side in (truth, answer)):
        return Verdict(False, "text")
    left, right = _tree(texts[0]), _tree(texts[1])
    if left is None or right is None:
        return Verdict(symbolic.equal(truth.value, answer.value), "math-verify")
    if not expression.symbols(right) <= expression.symbols(left):  # 0 times a word is not 0
        return Verdict(False, "value")
    same = _same_value(left, right, texts)
    if truth.percent != answer.percent and not (same and _may_mean_percent(truth, left)):
        hundredth = ("num", Fraction(1, 100))
        left = ("mul", left, hundredth) if truth.percent else left
        right = ("mul", right, hundredth) if answer.percent else right
        same = expression_value.same(left, right)
    if same is None:
        return Verdict(symbolic.equal(truth.value, answer.value), "math-verify")
    return Verdict(same, "value")


def _may_mean_percent(truth: Quantity, tree: expression.Node) -> bool:
    """True where a percent sign may be left out or added.

    That is always so if the reference has one; otherwise 50 may be 50%, but 0.5 not 0.5%.
    """
    value = expression_value.real_value(tree)
    return truth.percent or (value is not None and abs(value) > 1)


def _tree(text: str) -> expression.Node | None:
    if len(text) <= 60 and _NUMBER.fullmatch(text):
        return ("num", Fraction(text))
    if len(text) <= 60 and (match := _PERIODIC.fullmatch(text)):
        sign, whole, head, period = match.groups()
        value = Fraction(f"{whole or 0}.{head or 0}") + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(head))
        return ("num", -value if sign else value)
    return expression.parse(text)


def _same_value(truth: expression.Node, answer: expression.Node, texts: tuple[str, str]) -> bool | None:
    same = expression_value.same(truth, answer)
    if same or _is_rounding(texts[1], truth) or _is_rounding(texts[0], answer):
        return True
    return same


def _is_rounding(text: str, exact: expression.Node, places: int = _ROUNDING_DECIMALS) -> bool:
    """Check that `text`, a decimal with `places` digits or more, rounds a value that has no finite decimal form."""
    if not re.fullmatch(rf"-?\d*\.\d{{{places},}}", text):
        return False
    value = expression_value.rational(exact)
    if value is not None and _is_finite_decimal(value):
        return False
    places = len(text.split(".")[1])
    return bool(expression_value.close_to(exact, Fraction(text), Fraction(1, 2 * 10**places)))


def _is_finite_decimal(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
