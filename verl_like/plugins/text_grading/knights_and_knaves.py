"""Knights and knaves: is everybody's role right?

The answer is the text of the last <answer> ... </answer>, or the whole response without such tags; the last role that
it gives to a name counts. ground_truth: "Zoey is a knave, Noah is a knight", as the preprocessing script writes it.
"""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r"\b([A-Z]\w*) is (?:also )?(?:a |an )?(knight|knave)\b")


def roles(text: str) -> dict[str, str]:
    """Name -> role, the last one that the text gives."""
    return dict(_ROLE.findall(text))


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    partial_credit: bool = False,
) -> dict[str, Any]:
    """Score 1 if every role is right, else 0, or with `partial_credit` the share of right roles. `acc` is 1 or 0."""
    expected = roles(ground_truth)
    if not expected:
        raise ValueError(f"ground_truth gives nobody a role: {ground_truth[:200]!r}")
    end = solution_str.rfind("</answer>")
    start = solution_str.rfind("<answer>", 0, max(end, 0))
    given = roles(solution_str[start:end] if start >= 0 else solution_str)
    right = sum(given.get(name) == role for name, role in expected.items())
    complete = float(right == len(expected))
    pred = ", ".join(f"{name}: {given.get(name, 'unknown')}" for name in expected)
    return {"score": right / len(expected) if partial_credit else complete, "acc": complete, "pred": pred}
