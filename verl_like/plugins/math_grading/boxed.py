"""\\boxed{...}: Colossal-RL's reward type `boxed`.

Like the `math` grader, with Colossal-RL's names for the scores, its partial credit for an answer that equals the
reference only after braces, commas and spaces are removed, and its optional tags, each once and in order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from verl_like.plugins.math_grading.latex import last_boxed
from verl_like.plugins.math_grading.math_boxed import MAX_PRED_CHARS, matches, references


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    acc_score: float = 1.0,
    partial_score: float | None = None,
    format_score: float = 0.0,
    format_gate: bool = True,
    tags: Sequence[str] = (),
) -> dict[str, Any]:
    """Score `acc_score` (Colossal-RL: 10) for the right answer in the last box.

    Returns score, acc, answer_acc, format, pred.

    partial_score: for an answer that differs in { } , and spaces alone (Colossal-RL: 5; null: half of acc_score).
    tags: texts of which each must occur once, in this order.
    format_gate: otherwise the score is 0.
    """
    answer = last_boxed(solution_str)
    formatted = answer is not None and _once_in_order(solution_str, tags)
    right = answer is not None and matches(ground_truth, answer)[0]
    partly = not right and answer is not None and _bare(answer) in map(_bare, references(ground_truth))
    earned = acc_score if right else (acc_score / 2 if partial_score is None else partial_score) if partly else 0.0
    counts = formatted or not format_gate
    return {
        "score": earned if counts and earned else format_score * formatted,
        "acc": float(right and counts),
        "answer_acc": float(right),
        "format": float(formatted),
        "pred": (answer or "")[:MAX_PRED_CHARS],
    }


def _bare(answer: str) -> str:
    return re.sub(r"[{},\s]", "", answer)


def _once_in_order(text: str, tags: Sequence[str]) -> bool:
    places = [text.find(tag) for tag in tags]
    return all(text.count(tag) == 1 for tag in tags) and places == sorted(places)
