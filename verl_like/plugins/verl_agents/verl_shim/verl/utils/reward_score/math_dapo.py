"""verl.utils.reward_score.math_dapo, by the package's own grader."""

from __future__ import annotations

from typing import Any

from verl_like.plugins.math_grading import math_dapo
from verl_like.plugins.math_grading.latex import last_boxed


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    """Score 1 or -1, with acc and pred.

    strict_box_verify: the answer is in the last box, not behind `Answer:`.
    """
    if strict_box_verify:
        boxed = last_boxed(solution_str[-math_dapo.TAIL_CHARS :])
        solution_str = "" if boxed is None else f"Answer: {boxed}"
    return math_dapo.compute_score("math_dapo", solution_str, ground_truth, boxed_fallback=False)
