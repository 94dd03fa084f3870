"""Mathematics: the content of the last \\boxed{...} means the same as the reference answer.

verl grades MATH by normalised strings alone, other systems by math-verify alone; `math_equal.py` does both, and more.
"""

from __future__ import annotations

import re
from typing import Any

from verl_like.plugins.math_grading.latex import last_boxed
from verl_like.plugins.math_grading.math_equal import compare

MAX_PRED_CHARS = 300
_TAGS = ("<think>", "</think>")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    score: float = 1.0,
    format_score: float = 0.0,
    think_tags: bool = False,
) -> dict[str, Any]:
    """Score `score` for the right answer, `format_score` for another one in a box, 0 without a box.

    Returns score, acc, format, pred, and layer: the comparison that decided (see `math_equal.Verdict`).

    ground_truth: the answer (a \\boxed{...} around it is taken off), or a list of answers any of which is right.
    think_tags: the box counts only after exactly one <think> ... </think>.
    """
    answer = last_boxed(solution_str)
    well_formed = answer is not None and (not think_tags or _thinks_once(solution_str))
    if answer is None or not well_formed:
        return {"score": 0.0, "acc": 0.0, "format": 0.0, "pred": (answer or "")[:MAX_PRED_CHARS], "layer": "none"}
    right, layer = matches(ground_truth, answer)
    return {
        "score": score if right else format_score,
        "acc": float(right),
        "format": 1.0,
        "pred": answer[:MAX_PRED_CHARS],
        "layer": layer,
    }


def matches(ground_truth: Any, answer: str) -> tuple[bool, str]:
    """Compare the answer with the reference, or each of several; return the verdict and the layer that decided."""
    verdicts = [compare(truth, answer) for truth in references(ground_truth)]
    verdict = next((v for v in verdicts if v.same), verdicts[0])
    return verdict.same, verdict.layer


def references(ground_truth: Any) -> list[str]:
    """The reference answers as text, out of their boxes. Raises ValueError if there is none: the row is broken."""
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    texts = [("" if truth is None else str(truth)).strip() for truth in truths]
    texts = [last_boxed(text) or text for text in texts]
    if not texts or not all(texts):
        raise ValueError(f"the row has no ground truth to compare with: {ground_truth!r}")
    return texts


def _thinks_once(text: str) -> bool:
    tags = re.findall("|".join(_TAGS), text)
    return tuple(tags) == _TAGS and text.rfind("\\boxed") > text.index(_TAGS[1])
