"""hiyouga/geometry3k: verl's mix of 0.9 accuracy and 0.1 format (<think> ... </think> before a \\boxed{...})."""

from __future__ import annotations

from typing import Any

from verl_like.plugins.math_grading import math_boxed


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    format_weight: float = 0.1,
) -> dict[str, Any]:
    """Score (1 - format_weight) x right + format_weight x well-formed."""
    graded = math_boxed.compute_score(data_source, solution_str, ground_truth, extra_info)
    formatted = graded["format"] > 0 and _thinks_first(solution_str.strip())
    score = (1 - format_weight) * graded["acc"] + format_weight * formatted
    return {"score": score, "acc": graded["acc"], "format": float(formatted), "pred": graded["pred"]}


def _thinks_first(text: str) -> bool:
    """True for <think> ... </think> ... \\boxed{"""
    end = text.find("</think>")
    return text.startswith("<think>") and end > 0 and text.find("\\boxed{", end) > 0
