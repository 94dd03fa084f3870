"""verl.utils.reward_score.gsm8k, by the package's own grader."""

from __future__ import annotations

from typing import Any

from verl_like.plugins.math_grading import gsm8k


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The final answer, or None."""
    return gsm8k.extract_answer(solution_str, method)


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Score `score` for the right answer; a ground truth of None has none.

    Raises ValueError for any other ground truth that is no number.
    """
    if ground_truth is None:
        return 0.0 if extract_solution(solution_str, method) is None else format_score
    graded = gsm8k.compute_score(
        "openai/gsm8k", solution_str, ground_truth, method=method, format_score=format_score, score=score
    )
    return graded["score"]
