"""The graders of single answers, by hand: what each extracts, and what it pays."""

from __future__ import annotations

from typing import Any

import pytest

from verl_like.plugins.math_grading.latex import last_boxed, split_top_level
from verl_like.rewards.graders import choose, compute_score


def grade(grader: str, text: str, truth: Any, **options: Any) -> dict[str, Any]:
    return compute_score("any", text, truth, None, grader=grader, options={grader: options})


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{3}", "3"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"$\boxed 5$ done", "5"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{1} and \boxed{2", None),  # cut off in its answer
        (r"\boxed", None),
        (r"\boxed{}", ""),
        ("no box", None),
    ],
)
def test_the_last_box(text: str, box: str | None) -> None:
    assert last_boxed(text) == box


def test_top_level_commas() -> None:
    assert split_top_level(r"(1,2),\{3,4\},\frac{1,5}{2}") == ["(1,2)", r"\{3,4\}", r"\frac{1,5}{2}"]


def test_math_reads_the_last_box_and_says_what_decided() -> None:
    assert grade("math", r"\boxed{0.5}", r"\frac12") == {
        "score": 1.0,
        "acc": 1.0,
        "format": 1.0,
        "pred": "0.5",
        "layer": "value",
    }
    assert grade("math", r"\boxed{3} no, \boxed{4}", "3")["score"] == 0.0
    assert grade("math", r"the answer is 3", "3") == {
        "score": 0.0,
        "acc": 0.0,
        "format": 0.0,
        "pred": "",
        "layer": "none",
    }
    assert grade("math", r"\boxed{2}", [r"\boxed{1}", "2"])["score"] == 1.0
    assert grade("math", r"\boxed{5}", "4", format_score=0.1)["score"] == 0.1
    assert grade("math", r"\boxed{4}", 4)["score"] == 1.0


def test_math_with_think_tags() -> None:
    assert grade("math", r"<think>\boxed{3}</think> \boxed{4}", "4", think_tags=True)["score"] == 1.0
    for text in (r"\boxed{4}", r"<think></think><think></think>\boxed{4}", r"<think>\boxed{4}</think>"):
        assert grade("math", text, "4", think_tags=True)["score"] == 0.0


@pytest.mark.parametrize("truth", [None, "", [], "  "])
@pytest.mark.parametrize("grader", ["math", "math_dapo", "boxed", "think_answer_tags", "geometry3k"])
def test_a_row_without_ground_truth_is_an_error_and_no_zero(grader: str, truth: Any) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        grade(grader, r"<answer>1</answer> Answer: 1 \boxed{1}", truth)


@pytest.mark.parametrize(
    ("text", "score", "pred"),
    [
        ("blah\nAnswer: 34", 1.0, "34"),
        ("Answer: 33\nAnswer: $34$", 1.0, "$34$"),
        ("**Answer:** 34", 1.0, "34"),
        (r"answer : \boxed{34}", 1.0, "34"),
        (r"so \boxed{34}", 1.0, "34"),
        ("Answer: 35", -1.0, "35"),
        ("34", -1.0, "[INVALID]"),
        ("Answer: 34" + " " * 300, -1.0, "[INVALID]"),
    ],
)
def test_math_dapo(text: str, score: float, pred: str) -> None:
    graded = grade("math_dapo", text, "34")
    assert (graded["score"], graded["pred"], graded["acc"]) == (score, pred, score > 0)


def test_math_dapo_without_the_box() -> None:
    assert grade("math_dapo", r"so \boxed{34}", "34", boxed_fallback=False)["pred"] == "[INVALID]"


GOOD = "<think> hm </think> <answer> 1/2 </answer>"


@pytest.mark.parametrize(
    ("text", "options", "score", "answer_acc", "well_formed"),
    [
        (GOOD, {}, 1.0, 1, 1),
        (GOOD, {"acc_score": 10.0}, 10.0, 1, 1),
        (GOOD + "\n", {}, 1.0, 1, 1),
        (GOOD + " bye", {}, 0.0, 1, 0),  # it must end with the tag
        ("<answer>1/2</answer>", {}, 0.0, 1, 0),
        ("<answer>1/2</answer>", {"format_gate": False}, 1.0, 1, 0),
        (GOOD.replace("<think>", "", 1), {"think_in_prompt": True}, 1.0, 1, 1),
        (GOOD, {"think_in_prompt": True}, 0.0, 1, 0),
        (GOOD + GOOD, {}, 0.0, 1, 0),  # each tag once
        ("<answer>1/2</answer><think></think>", {}, 0.0, 1, 0),
        (GOOD.replace("1/2", "1/3"), {}, 0.0, 0, 1),
        (GOOD.replace("1/2", "1/3"), {"format_score": 0.2}, 0.2, 0, 1),
        ("1/2", {}, 0.0, 0, 0),
        ("</answer> 1/2 <answer>", {}, 0.0, 0, 0),
    ],
)
def test_think_answer_tags(text: str, options: dict[str, Any], score: float, answer_acc: int, well_formed: int) -> None:
    graded = grade("think_answer_tags", text, "0.5", **options)
    assert (graded["score"], graded["answer_acc"], graded["format"]) == (score, answer_acc, well_formed)


def test_boxed_with_colossal_scores() -> None:
    colossal = {"acc_score": 10.0, "partial_score": 5.0}
    assert grade("boxed", r"\boxed{x+1}", "1+x", **colossal)["score"] == 10.0
    partly = grade("boxed", r"\boxed{a b, c}", "{abc}", **colossal)
    assert (partly["score"], partly["acc"]) == (5.0, 0.0)
    assert grade("boxed", r"\boxed{x+2}", "1+x", **colossal)["score"] == 0.0
    tagged = {**colossal, "tags": ["<think>", "</think>"]}
    assert grade("boxed", r"<think></think>\boxed{1}", "1", **tagged)["score"] == 10.0
    loose = grade("boxed", r"</think><think>\boxed{1}", "1", **tagged)
    assert (loose["score"], loose["acc"], loose["answer_acc"], loose["format"]) == (0.0, 0.0, 1.0, 0.0)


def test_geometry3k_mixes_accuracy_and_format() -> None:
    assert grade("geometry3k", r"<think>x</think> \boxed{3}", "3")["score"] == pytest.approx(1.0)
    assert grade("geometry3k", r"\boxed{3}", "3")["score"] == pytest.approx(0.9)
    assert grade("geometry3k", r"<think>x</think> \boxed{4}", "3")["score"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{B. seven}", "B"),
        ("<answer> (B) </answer>", "B"),
        ("The answer is B.", "B"),
        ("the answer is (B), not A", "B"),
        ("Answer: **B**", "B"),
        ("**Answer**: B", "B"),
        ("The correct option is option B because A is wrong", "B"),
        ("I think (A) no, (B)", "B"),
        ("thinking...\nB", "B"),
        ("thinking...\n**B.**", "B"),
        ("The answer is Bananas", ""),
        ("A bird", ""),
        ("The answer is Z", ""),
        ("", ""),
    ],
)
def test_multiple_choice(text: str, letter: str) -> None:
    assert grade("multiple_choice", text, "B")["pred"] == letter


def test_multiple_choice_truths_and_strictness() -> None:
    assert all(
        grade("multiple_choice", r"\boxed{B}", truth)["score"] == 1.0 for truth in ("B", "(b)", 1, r"\text{(B)}")
    )
    assert grade("multiple_choice", "maybe (B)", "B")["score"] == 1.0
    assert grade("multiple_choice", "maybe (B)", "B", strict=True)["score"] == 0.0
    for broken in ("", "BC", None, 77, True):
        with pytest.raises(ValueError, match="multiple-choice"):
            grade("multiple_choice", "B", broken)


def test_exact_match_and_f1_after_squad_normalisation() -> None:
    assert grade("exact_match", "<answer>The Eiffel-Tower!</answer>", "eiffeltower")["score"] == 1.0
    graded = grade("f1", "Answer: the big red dog", ["a red cat", "red dog"])
    assert graded["score"] == pytest.approx(2 * 2 / (2 + 3)) and graded["acc"] == 0.0
    assert grade("f1", "blue", "red")["score"] == 0.0
    assert grade("contains", "It was in Paris, France", {"target": ["Paris"]})["score"] == 1.0
    assert grade("contains", "It was in Parisian style", {"target": ["Paris"]})["score"] == 0.0
    with pytest.raises(ValueError, match="reference"):
        grade("f1", "x", {"target": [None]})


def test_search_r1_wants_the_tags() -> None:
    assert grade("search_r1", "<answer>Paris</answer>", {"target": ["paris", "Lutetia"]})["score"] == 1.0
    assert grade("search_r1", "Paris", {"target": "paris"}) == {
        "score": 0.0,
        "acc": 0.0,
        "f1": 0.0,
        "format": 0.0,
        "pred": "",
    }


@pytest.mark.parametrize(
    ("source", "grader"),
    [
        ("lighteval/MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("numina_olympiads", "math"),
        ("math", "math_dapo"),
        ("math_dapo", "math_dapo"),
        ("math_dapo_reasoning", "math_dapo"),
        ("aime2024", "math_dapo"),
        ("hiyouga/geometry3k", "geometry3k"),
        ("searchR1_nq", "search_r1"),
    ],
)
def test_verl_routes(source: str, grader: str) -> None:

    assert choose().grader_of_row(source, "rule") == grader
