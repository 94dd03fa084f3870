"""1 for the right product in the last answer, 0 for anything else."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """solution_str is everything after the prompt, what the tool said included; the answer is the last turn."""
    answer = solution_str.rpartition("assistant\n")[2]
    right = float(answer == ground_truth)
    return {"score": right, "acc": right}
