"""The quickstart's reward: 1 for the right sum, 0 for anything else. Any function with this signature will do."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """`score` is the reward; further numbers become metrics (`acc` is validation's headline)."""
    right = float(solution_str.strip() == ground_truth)
    return {"score": right, "acc": right}
