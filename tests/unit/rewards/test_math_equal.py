"""When two mathematical answers are the same: written cases, every reference answer of MATH, and the layers."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.grader_rows import FORMS, cases, gsm8k_rows, math_rows, perturb, respell
from verl_like.plugins.math_grading import symbolic
from verl_like.plugins.math_grading.expression import UnknownExpression, parse, tokenise
from verl_like.plugins.math_grading.expression_value import proportional, rational, same
from verl_like.plugins.math_grading.intervals import same_set
from verl_like.plugins.math_grading.math_equal import compare, equal
from verl_like.plugins.math_grading.units import split_unit
from verl_like.rewards.graders import choose, compute_score

HERE = Path(__file__).resolve().parent
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def test_equivalent_forms_are_right() -> None:
    pairs = cases(HERE / "data" / "equivalent.txt")
    assert len(pairs) >= 200
    assert [pair for pair in pairs if not equal(*pair)] == []


def test_near_misses_are_wrong() -> None:
    pairs = cases(HERE / "data" / "near_miss.txt")
    assert len(pairs) >= 200
    assert [pair for pair in pairs if equal(*pair)] == []


@pytest.mark.parametrize("path", ["math/math_train.json", "gsm8k"])
def test_reference_answers_agree_with_themselves_and_not_with_perturbed_ones(path: str) -> None:
    if not (SHARED / path).exists():
        pytest.skip(f"{SHARED / path} is not there")
    rows = math_rows(SHARED / path) if path.startswith("math") else gsm8k_rows(SHARED / path)
    assert len(rows) == 3 * (7470 if path.startswith("math") else 7473 + 1319)
    counted: Counter[str] = Counter()
    wrong = []
    for row in rows:
        grader = choose().grader_of_row(row.data_source)
        graded = compute_score(row.data_source, row.response, row.truth, {}, grader=grader)
        counted[row.form] += 1
        if (graded["score"] > 0) != row.right:
            wrong.append((row.form, row.truth, graded["pred"]))
    assert wrong == []
    assert set(counted) == set(FORMS)


def test_the_made_rows_are_what_they_claim() -> None:
    assert [respell(a) for a in ("3", r"\frac{1}{2}", r"2\sqrt{3}")] == ["3.0", "(1)/(2)", r"\sqrt{3}\cdot 2"]
    assert [perturb(a) for a in ("39", "x", r"\text{No}", "C")] == ["30", "x+1", r"W\text{No}", "WC"]


@pytest.mark.parametrize(
    ("truth", "answer", "layer"),
    [
        (r"\frac12", r"\dfrac{1}{2}", "text"),
        ("(1,2)", "(1,2.0)", "structure"),
        ("0.5", r"\frac12", "value"),
        (r"\lfloor 3.5 \rfloor", "3", "math-verify"),
    ],
)
def test_the_layer_that_decides(truth: str, answer: str, layer: str) -> None:
    verdict = compare(truth, answer)
    assert (verdict.same, verdict.layer) == (True, layer)


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_a_comparison_that_never_ends_says_not_equal(monkeypatch: pytest.MonkeyPatch, in_a_thread: bool) -> None:
    """sympy multiplies this power out, in one loop; in a thread too, where a signal would not arrive."""
    monkeypatch.setattr(symbolic, "_MAX_SECONDS", 0.3)
    monkeypatch.setattr(symbolic, "_MAX_TERMS", 10**12)
    power = rf"(\lfloor x \rfloor+y+z+w)^{{{300 + in_a_thread}}}"
    if not in_a_thread:
        assert symbolic.equal(power, "1") is False
    else:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(symbolic.equal, power, "1").result(timeout=60) is False
    assert symbolic.equal(r"\lfloor 3.5 \rfloor", "3")  # nothing is left behind


def test_a_power_with_too_many_terms_is_refused_before_it_is_parsed() -> None:
    assert list(symbolic._terms_of_powers(r"(\lfloor x \rfloor+y+z+w)^{300}(a-b)^2 {x}^9")) == [4590551, 3, 1]
    assert not equal("1", r"(\lfloor x \rfloor+y+z+w)^{300}")


def test_a_long_answer_is_compared_as_it_is_written() -> None:
    long = "+".join(["x"] * 600)
    assert equal(long, f" {long} ") and not equal(long, f"{long}+0") and not equal("x", long)


def same_text(left: str, right: str) -> bool | None:
    trees = parse(left), parse(right)
    assert trees[0] is not None and trees[1] is not None
    return same(*trees)


@pytest.mark.parametrize(
    ("left", "right", "verdict"),
    [
        ("1-2-3", "-4", True),
        ("12/3/2", "2", True),
        ("-2^2", "-4", True),
        ("2^-1", "0.5", True),
        ("2--3", "5", True),
        (r"\frac12x", r"\frac{x}{2}", True),
        (r"\sin^2x+\cos^2x", "1", True),
        (r"\sin x\cos x", r"\frac12\sin 2x", True),
        (r"\sqrt{x^2}", "|x|", True),
        (r"\sqrt{x^2}", "x", None),  # equal for positive values only
        ("|-|x||", "|x|", None),  # nested bars are not in the language
        ("2^{200}", "2^{200}+1", False),
        (r"2^{200}\pi", r"(2^{200}+1)\pi", True),  # beyond 45 digits it cannot see
        ("x^{2000}", "x^{2000}", True),
        ("x^{3000}", "x^{3001}", None),  # too large
        ("10^{10^{10}}", "10^{10^{11}}", None),
        ("400!", "401!", None),
        ("1/0", "2/0", None),
    ],
)
def test_values(left: str, right: str, verdict: bool | None) -> None:
    if "||" in left:
        assert parse(left) is None
    else:
        assert same_text(left, right) is verdict


@pytest.mark.parametrize(
    "text", ["3 4", "x +", "(1", "1)", "{", r"\frac{1}", r"\foo", "x_{", "f''", "1;2", "(" * 60 + "1"]
)
def test_what_is_not_in_the_language_is_refused(text: str) -> None:
    assert parse(text) is None


def test_long_input_is_refused_before_it_is_read() -> None:
    with pytest.raises(UnknownExpression):
        tokenise("1+" * 1000 + "1")
    assert parse("9" * 61) is None


def test_rational_values() -> None:
    tree = parse(r"\frac{1}{3}+\sqrt{4}")
    assert tree is not None and str(rational(tree)) == "7/3"
    irrational = parse(r"\sqrt{2}")
    assert irrational is not None and rational(irrational) is None


def test_equations_up_to_a_factor() -> None:
    trees = [parse(text) for text in ("x+y-1", "2-2x-2y", "x-y-1")]
    assert proportional(trees[0], trees[1]) is True  # type: ignore[arg-type]
    assert proportional(trees[0], trees[2]) is False  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("left", "right", "verdict"),
    [
        (r"[0,1]\cup[1,2]", "[0,2]", True),
        (r"[0,1)\cup(1,2]", "[0,2]", False),
        (r"[0,1)\cup\{1\}\cup(1,2]", "[0,2]", True),
        (r"(0,2)\cup(1,3)", "(0,3)", True),
        (r"(\sqrt2,2)", "(2^{1/2},2)", True),
        (r"\mathbb{R}", r"(-\infty,\infty)", True),
        ("(2,1)", "(1,2)", None),
        ("(a,b)", "(a,b)", None),
        ("(i,2)", "(i,2)", None),
    ],
)
def test_intervals_as_sets(left: str, right: str, verdict: bool | None) -> None:
    assert same_set(left, right) is verdict


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        (r"20 \text{ sq units}", "20", "unit2"),
        (r"36 \text{ cm}^2", "36", "cm2"),
        (r"12 \text{ cubic feet}", "12", "foot3"),
        (r"60 \text{ km/h}", "60", "km/hour"),
        (r"3 \text{ red balls}", "3", "other"),
        ("5 cm", "5", "cm"),
        ("5m", "5m", ""),
        ("5 m", "5 m", ""),
        (r"\$42", "42", "dollar"),
        (r"30^\circ", "30", "degree"),
        ("x+1", "x+1", ""),
    ],
)
def test_units(text: str, value: str, unit: str) -> None:
    found = split_unit(text)
    assert (found.value, found.unit) == (value, unit)


def test_one_letter_is_a_unit_only_where_asked() -> None:
    assert split_unit("5 m", one_letter=True).unit == "m"
    assert split_unit("5m", one_letter=True).unit == ""
