"""A grader has to be named, and is not asked: every episode of play.py that is not lost has its reward. At the start of
a run it is tried all the same, with a warning."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """RuntimeError: an episode without the environment's reward counts as failed, never as 0."""
    raise RuntimeError("the environment gives the reward: there is nothing to grade (right at the start of a run)")
