"""Ground truths that are dictionaries: JSON text counts like the dictionary, anything else fails the row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from verl_like.rewards.graders import compute_score

CASES: dict[str, tuple[Any, str]] = {
    "countdown": ({"target": 9, "numbers": [1, 2, 3]}, "<answer>(1+2)*3</answer>"),
    "instruction": ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, "none"),
    "search_r1": ({"target": ["Paris"]}, "<answer>paris</answer>"),
    "tool_call": ({"name": "f", "arguments": {"x": 1}}, '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'),
}


@pytest.mark.parametrize("grader", CASES)
def test_json_text_counts_like_the_dictionary(grader: str) -> None:
    truth, right = CASES[grader]
    for form in (truth, json.dumps(truth)):
        assert compute_score("any", right, form, {}, grader=grader)["score"] == 1.0
        wrong = compute_score("any", "I do not know, sorry", form, {}, grader=grader)
        assert wrong["score"] == 0.0


@pytest.mark.parametrize("grader", ["countdown", "instruction", "tool_call"])
@pytest.mark.parametrize("truth", [None, {}, [], 5, "", "x", "{", {"name": None, "target": None}])
def test_what_is_no_ground_truth_fails_the_row(grader: str, truth: Any) -> None:
    """Whatever the response is: a score of 0 would blame the response for the data."""
    for response in ("nothing", CASES[grader][1]):
        with pytest.raises(ValueError, match=r"ground_truth must be a dictionary|the row has no"):
            compute_score("any", response, truth, {}, grader=grader)


@pytest.mark.parametrize("grader", ["gsm8k", "gsm8k_flexible", "arithmetic"])
@pytest.mark.parametrize("truth", [None, "", " ", [], ["72"], {"answer": "72"}, True])
def test_a_ground_truth_that_no_answer_can_equal_fails_the_row(grader: str, truth: Any) -> None:
    for response in ("#### 72", "nothing"):
        with pytest.raises(ValueError, match="ground_truth must be"):
            compute_score("any", response, truth, {}, grader=grader)


@pytest.mark.parametrize("truth", ["72", 72, 72.0, "$72", "7x = 5, so\n#### 72", "#### 72.", "#### 1 so #### 72"])
def test_gsm8k_takes_its_own_raw_answers(truth: Any) -> None:
    assert compute_score("gsm8k", "it is\n#### 72", truth)["score"] == 1.0
    assert compute_score("gsm8k", "it is\n#### 71", truth)["score"] == 0.0


@pytest.mark.parametrize(
    "truth", ["seventy-two", "72 apples", "it is 72", "####", "#### ?", "nan", "inf", float("nan")]
)
def test_gsm8k_does_not_guess(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"ends in '#### number'.*reward_model\.rule"):
        compute_score("gsm8k", "#### 72", truth)
