"""<think> ... </think> <answer> ... </answer>: Colossal-RL's reward type `think_answer_tags`.

The answer is the text of the last <answer> ... </answer>. The format is right iff each of the four tags occurs exactly
once, in order, and </answer> ends the response. A right answer in a wrong format earns nothing (`format_gate`).
"""

from __future__ import annotations

import re
from typing import Any

from verl_like.plugins.math_grading.math_boxed import MAX_PRED_CHARS, matches

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_ANY_TAG = re.compile("|".join(_TAGS))


def extract_answer(solution_str: str) -> str | None:
    """The text of the last <answer> ... </answer>, stripped, or None."""
    end = solution_str.rfind("</answer>")
    start = solution_str.rfind("<answer>", 0, max(end, 0))
    return None if end < 0 or start < 0 else solution_str[start + len("<answer>") : end].strip()


def format_is_right(solution_str: str, *, think_in_prompt: bool = False) -> bool:
    """Check that the response has exactly the expected tags, in order, and ends with the last.

    think_in_prompt: the prompt ends with <think>, so the response has none.
    """
    expected = _TAGS[1:] if think_in_prompt else _TAGS
    text = solution_str.strip()
    return tuple(_ANY_TAG.findall(text)) == expected and text.endswith(_TAGS[-1])


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    acc_score: float = 1.0,
    format_score: float = 0.0,
    format_gate: bool = True,
    think_in_prompt: bool = False,
) -> dict[str, Any]:
    """Score `acc_score` for the right answer (Colossal-RL: 10), `format_score` for another one in the right format.

    Returns score, acc (what counted), answer_acc (whatever the format), format, pred.

    format_gate: the answer counts only in the right format.
    """
    answer = extract_answer(solution_str)
    formatted = format_is_right(solution_str, think_in_prompt=think_in_prompt)
    right = answer is not None and matches(ground_truth, answer)[0]
    counts = right and (formatted or not format_gate)
    return {
        "score": acc_score if counts else format_score * formatted,
        "acc": float(counts),
        "answer_acc": float(right),
        "format": float(formatted),
        "pred": (answer or "")[:MAX_PRED_CHARS],
    }
