"""Short answers to questions: exact match and token F1 after SQuAD's normalisation.

Normalisation and F1 are those of SQuAD's evaluation script (P. Rajpurkar et al., arXiv 1606.05250): lower case, no
punctuation, no articles, single spaces. verl's searchR1_* sources use the exact match on the last <answer> tags.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from verl_like.plugins.math_grading.latex import last_boxed
from verl_like.plugins.math_grading.think_answer import extract_answer
from verl_like.plugins.math_grading.truth import dictionary_with

MAX_PRED_CHARS = 300
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ANSWER_LINE = re.compile(r"(?i)answer(?: is)? ?: *([^\n]+)")
_FROM = ("auto", "tags", "boxed", "line", "whole")
_TARGET = re.compile(r'\s*\{\s*"target"\s*:')
_METRICS = ("exact", "f1", "contains")


def normalise(text: str) -> str:
    """SQuAD's normalisation."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(truth: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the normalised words."""
    left, right = normalise(truth).split(), normalise(answer).split()
    if not left or not right:
        return float(left == right)
    shared = sum((Counter(left) & Counter(right)).values())
    return 2 * shared / (len(left) + len(right))


def extract(solution_str: str, where: str) -> str | None:
    """The answer from <answer> tags, the last box, the last `Answer:` line, all of it; auto: the first found."""
    if where not in _FROM:
        raise ValueError(f"answer_from must be one of {', '.join(_FROM)}, not {where!r}")
    lines = _ANSWER_LINE.findall(solution_str) if where in ("auto", "line") else []
    found = {
        "tags": extract_answer(solution_str),
        "boxed": last_boxed(solution_str),
        "line": lines[-1].strip() if lines else None,
        "whole": solution_str.strip(),
    }
    if where != "auto":
        return found[where]
    return next((answer for answer in found.values() if answer is not None), None)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    metric: str = "exact",
    answer_from: str = "auto",
    score: float = 1.0,
    format_score: float = 0.0,
) -> dict[str, Any]:
    """Best over the reference answers: exact match, `contains` (the answer contains a reference), or F1.

    ground_truth: text, a list of accepted answers, or verl's {"target": text or list}. `format_score` is for an answer
    that earns nothing else. Returns score, acc (1 for an exact match; for `contains` that), f1, format, pred.
    """
    if metric not in _METRICS:
        raise ValueError(f"metric must be one of {', '.join(_METRICS)}, not {metric!r}")
    truths = _truths(ground_truth)
    answer = extract(solution_str, answer_from)
    if answer is None:
        return {"score": 0.0, "acc": 0.0, "f1": 0.0, "format": 0.0, "pred": ""}
    words = normalise(answer)
    exact = any(normalise(truth) == words for truth in truths)
    inside = any(f" {normalise(truth)} " in f" {words} " for truth in truths)
    overlap = max(f1(truth, answer) for truth in truths)
    value = {"exact": float(exact), "contains": float(inside), "f1": overlap}[metric]
    return {
        "score": score * value or format_score,
        "acc": float(inside if metric == "contains" else exact),
        "f1": overlap,
        "format": 1.0,
        "pred": answer[:MAX_PRED_CHARS],
    }


def _truths(ground_truth: Any) -> list[str]:
    as_json = isinstance(ground_truth, str) and _TARGET.match(ground_truth) is not None
    if isinstance(ground_truth, dict) or as_json:
        ground_truth = dictionary_with(ground_truth, "target")["target"]
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    texts = [str(truth) for truth in truths if truth is not None]
    if not any(map(normalise, texts)):
        raise ValueError(f"the row has no reference answer: {ground_truth!r}")
    return [text for text in texts if normalise(text)]
