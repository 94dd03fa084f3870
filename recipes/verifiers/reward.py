"""A grader has to be named, and is never asked: every episode of play.py that is not lost has its reward."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Nothing."""
    return 0.0
