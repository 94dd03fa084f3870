"""verl.utils.reward_score.geo3k, by the package's own grader of mathematics."""

from __future__ import annotations

import re
from typing import Any

from verl_like.plugins.math_grading import math_boxed
from verl_like.plugins.math_grading.latex import last_boxed

_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(predict_str: str) -> float:
    """Score 1 for a box after thoughts in tags, else 0."""
    return float(_FORMAT.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: Any, use_boxed: bool = True) -> float:
    """Score 1 for the right answer, of the last box or, without `use_boxed`, as the whole text."""
    answer = last_boxed(predict_str) if use_boxed else last_boxed(predict_str) or predict_str
    return float(bool(answer) and math_boxed.matches(ground_truth, answer)[0])


def compute_score(predict_str: str, ground_truth: Any, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """Score (1 - format_score) x right + format_score x well-formed."""
    right = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * right + format_score * format_reward(predict_str)
