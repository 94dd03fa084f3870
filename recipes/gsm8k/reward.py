"""A GSM8K reward with something to learn for a model that cannot calculate: the right answer, and the answer's form.

1 for the right final number after "####"; else 0.1 for any number there, and up to 0.05 for plain ASCII text, which is
all that a freshly initialised model with a vocabulary of 150,000 pieces can learn in a few steps.
"""

from __future__ import annotations

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """`acc` is the strict grade alone; `formatted` says whether there is an answer at all."""
    found = re.search(r"####\s*(-?[\d.,]*\d)", solution_str)
    answer = found.group(1).replace(",", "") if found else None
    right = float(answer is not None and answer == str(ground_truth).replace(",", ""))
    plain = sum(character.isascii() for character in solution_str) / max(1, len(solution_str))
    score = right if right else 0.1 * (answer is not None) + 0.05 * plain
    return {"score": score, "acc": right, "formatted": float(answer is not None)}
