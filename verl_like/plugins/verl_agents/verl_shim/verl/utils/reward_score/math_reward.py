"""verl.utils.reward_score.math_reward, by the package's own grader of mathematics."""

from __future__ import annotations

from typing import Any

from verl_like.plugins.math_grading import math_boxed


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """Score 1 for the right answer in the last box, else 0."""
    return math_boxed.compute_score("MATH", solution_str, ground_truth)["score"]


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Compare two answers by meaning; two of None are equal."""
    return str1 == str2 if str1 is None or str2 is None else math_boxed.matches(str1, str2)[0]
