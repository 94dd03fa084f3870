"""Arithmetic: the response, stripped, is the expected text."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """1 when the whole response equals the ground truth, white space around it aside; 0 otherwise."""
    answer = solution_str.strip()
    score = float(answer == str(ground_truth).strip())
    return {"score": score, "acc": score, "pred": answer}
