"""DAPO's mathematics: the response ends with `Answer: ...`; +1 if it is right, -1 if not.

The prompt of DAPO-Math-17k asks for that line. As in verl, only the last 300 characters are read. Departures: answers
are compared by meaning (`math_equal.py`) where verl compares normalised strings, a \\boxed{...} on the line is opened,
and without such a line a \\boxed{...} in the tail counts (`boxed_fallback=False` turns that off).
"""

from __future__ import annotations

import re
from typing import Any

from verl_like.plugins.math_grading.latex import last_boxed
from verl_like.plugins.math_grading.math_boxed import MAX_PRED_CHARS, matches

TAIL_CHARS = 300
_ANSWER = re.compile(r"(?i)answer\s*:\s*\**\s*([^\n]+)")
NO_ANSWER = "[INVALID]"  # verl's word


def extract_answer(solution_str: str, *, boxed_fallback: bool = True) -> str | None:
    """Return the text after the last `Answer:` of the response's tail; None where there is none.

    boxed_fallback: without `Answer:`, take the content of the last boxed expression.
    """
    tail = solution_str[-TAIL_CHARS:]
    lines = _ANSWER.findall(tail)
    if lines:
        line = lines[-1].strip().removesuffix("**")
        return last_boxed(line) or line
    return last_boxed(tail) if boxed_fallback else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    score: float = 1.0,
    wrong_score: float = -1.0,
    boxed_fallback: bool = True,
) -> dict[str, Any]:
    """Score `score` or `wrong_score`; acc, pred (`[INVALID]` where no answer was found) and layer tell why."""
    answer = extract_answer(solution_str, boxed_fallback=boxed_fallback)
    right, layer = (False, "none") if answer is None else matches(ground_truth, answer)
    pred = NO_ANSWER if answer is None else answer[:MAX_PRED_CHARS]
    return {"score": score if right else wrong_score, "acc": right, "pred": pred, "layer": layer}
