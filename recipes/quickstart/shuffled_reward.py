"""A control: the quickstart's rewards, but handed to the wrong responses. A run with it must not learn.

Each response gets the true reward of a random one among the last responses scored, so the rewards keep their
distribution and say nothing about the response. `acc` stays true: it is only reported.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

_recent_scores: deque[float] = deque(maxlen=1024)
_random = random.Random(0)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    right = float(solution_str.strip() == ground_truth)
    _recent_scores.append(right)
    return {"score": _random.choice(_recent_scores), "acc": right}
