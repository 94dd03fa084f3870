"""Arithmetic: the response, stripped, is the expected text."""

from __future__ import annotations

from numbers import Real
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 when the whole response, stripped, equals the ground truth (text or a number); else 0."""
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | Real) or not str(ground_truth).strip():
        raise ValueError(f"arithmetic: ground_truth must be text or a number, not {ground_truth!r:.200}")
    answer = solution_str.strip()
    score = float(answer == str(ground_truth).strip())
    return {"score": score, "acc": score, "pred": answer}
