"""The built-in graders: hand cases, and every reference answer of GSM8K against itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_like.plugins.math_grading import arithmetic, countdown, gsm8k
from verl_like.rewards import graders

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"


def gsm8k_score(text: str, truth: str, **options: object) -> float:
    return gsm8k.compute_score("openai/gsm8k", text, truth, **options)["score"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("so #### 72", "72", 1.0),
        ("#### 71 no, #### 72", "72", 1.0),  # the last one counts
        ("#### 72 no, #### 71", "72", 0.0),
        ("#### 1,234", "1234", 1.0),
        ("#### 1234", "1,234", 1.0),
        ("#### -5", "-5", 1.0),
        ("#### 5", "-5", 0.0),
        ("#### 72.", "72", 1.0),
        ("#### 72.0", "72", 1.0),
        ("#### 72.5", "72", 0.0),
        ("72", "72", 0.0),  # strict: no marker, no score
        ("####72", "72", 0.0),
        ("#### $72", "72", 0.0),
        ("#### ...", "72", 0.0),
        ("", "72", 0.0),
        ("#### 72" + " " * 300, "72", 0.0),  # outside the last 300 characters
        ("#### 72" + " " * 293, "72", 1.0),
    ],
)
def test_gsm8k_strict(text: str, truth: str, expected: float) -> None:
    assert gsm8k_score(text, truth) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("it is 7, no: $72.", 1.0), ("72 then 7", 0.0), ("none at all ...", 0.0), ("7,2", 1.0)]
)
def test_gsm8k_flexible_takes_the_last_number(text: str, expected: float) -> None:
    assert gsm8k_score(text, "72", method="flexible") == expected


def test_gsm8k_format_score_is_for_wrong_answers_in_the_right_form() -> None:
    assert gsm8k_score("#### 3", "4", format_score=0.1) == 0.1
    assert gsm8k_score("3", "4", format_score=0.1) == 0.0
    with pytest.raises(ValueError, match="loose"):
        gsm8k_score("3", "4", method="loose")


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gsm8k_reference_answer_grades_right_and_perturbed_ones_wrong(split: str) -> None:
    path = DATA / "gsm8k" / f"{split}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    from verl_like.kit.datasets.gsm8k import final_answer

    answers = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    assert len(answers) in (7473, 1319)
    for answer in answers:
        truth = final_answer(answer)
        assert gsm8k_score(answer, truth) == 1.0, answer
        assert gsm8k_score(answer, truth, method="flexible") == 1.0, answer
        for wrong in (f"{answer}1", answer.replace("#### ", "#### 9"), answer.replace("####", "###")):
            assert gsm8k_score(wrong, truth) == 0.0, wrong


@pytest.mark.parametrize(
    ("equation", "expected"),
    [
        ("(44 - 19) + 35", True),
        ("35+44-19 = 60", True),
        ("44 \u2212 19 + 35", True),
        ("44 - 19 + 35 = 61", False),
        ("44 - 19 + 35 = 60 = 60", False),
        ("44 + 35", False),  # one number is missing
        ("60", False),
        ("44 - 19 + 35 + 35 - 35", False),  # one is used three times
        ("44 - 19 + 35.0", False),
        ("44 - 19 + True * 35", False),
        ("__import__('os').getpid()", False),
        ("44 ** 19 ** 35", False),
        ("44 / (19 - 19) + 35", False),
        ("44 -", False),
        ("", False),
        ("(" * 199, False),
        ("-" * 5000 + "44 - 19 + 35", False),
    ],
)
def test_countdown_equations(equation: str, expected: bool) -> None:
    assert countdown.is_solution(equation, [44, 19, 35], 60) is expected


@pytest.mark.parametrize("truth", [{"target": "24", "numbers": [4, 6]}, {"target": 24, "numbers": ["4", "6"]}])
def test_countdown_numbers_that_are_text_fail_the_row(truth: dict[str, Any]) -> None:
    """No answer could be right, and every one would score 0."""
    with pytest.raises(ValueError, match="must be numbers"):
        countdown.compute_score("countdown", "<answer>4*6</answer>", truth)


def test_countdown_divides_exactly() -> None:
    assert countdown.is_solution("8 / (3 - 8 / 3)", [8, 3, 8, 3], 24)  # a float is off by 1e-15 here


def test_countdown_scores() -> None:
    truth = {"target": 60, "numbers": [44, 19, 35]}
    right = countdown.compute_score("countdown", "<answer>1</answer> so <answer> 44-19+35 </answer>", truth)
    assert right == {"score": 1.0, "acc": 1.0, "pred": "44-19+35"}
    assert countdown.compute_score("countdown", "<answer>44</answer>", truth)["score"] == 0.1
    assert countdown.compute_score("countdown", "44-19+35", truth)["score"] == 0.0


def test_arithmetic_is_an_exact_match_after_strip() -> None:
    assert arithmetic.compute_score("arithmetic", " 95\n", "95")["score"] == 1.0
    assert arithmetic.compute_score("arithmetic", "95.", "95")["score"] == 0.0


def test_routing_by_data_source() -> None:
    assert graders.compute_score("openai/gsm8k", "#### 3", "3")["score"] == 1.0
    assert graders.compute_score("arithmetic", "3", "3")["score"] == 1.0
    with pytest.raises(ValueError, match=r"'nope' \(built in: .*arithmetic, .*custom_reward_function\.path"):
        graders.compute_score("nope", "3", "3")
