"""GSM8K: the number after the last `####`.

Semantics are those of verl's grader (`strict`: a `#### number` must be there; `flexible`: the last number of the text),
with two departures: the end of a sentence is no part of the number (`#### 72.` is 72), and numbers are compared by
value (`72.0` equals `72`).
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from numbers import Real
from typing import Any

CLIP_CHARS = 300  # the answer stands at the end: looking only there keeps the regular expressions cheap
_NUMBER = r"-?[0-9.,]+"
_STRICT = re.compile(rf"#### ({_NUMBER})")
_FLEXIBLE = re.compile(f"({_NUMBER})")


def extract_answer(solution_str: str, method: str = "strict") -> str | None:
    """The final answer as a plain number without thousands separators, or None.

    method: "strict" wants `#### number`; "flexible" takes the last number of the text.
    """
    tail = solution_str[-CLIP_CHARS:]
    if method == "strict":
        found = _STRICT.findall(tail)
    elif method == "flexible":
        found = [number for number in _FLEXIBLE.findall(tail) if any(c.isdigit() for c in number)]
    else:
        raise ValueError(f"gsm8k: method must be strict or flexible, not {method!r}")
    return _normalise(found[-1]) if found else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """Score `score` for the right answer, `format_score` for a wrong one in the right form, 0 without an answer.

    ground_truth: a number, as such or as text, or a text that ends in `#### number`, as GSM8K's own answers do.
    ValueError for anything else: that is a failed reward, as no response could be right.
    """
    reference = _reference(ground_truth)
    answer = extract_answer(solution_str, method)
    if answer is None:
        return {"score": 0.0, "pred": ""}
    right = _same_number(answer, reference)
    return {"score": score if right else format_score, "pred": answer}


def _reference(ground_truth: Any) -> str:
    text = str(ground_truth) if isinstance(ground_truth, Real) and not isinstance(ground_truth, bool) else ground_truth
    number = _normalise(text.rpartition("####")[2]) if isinstance(text, str) else ""
    try:
        if Decimal(number).is_finite():
            return number
    except InvalidOperation:
        pass
    raise ValueError(
        f"gsm8k: ground_truth must be a number, or a text that ends in '#### number', not {ground_truth!r:.200}; "
        "choose another grader with reward_model.rule or rule_by_source, or mend the data"
    )


def _normalise(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "").rstrip(".")


def _same_number(left: str, right: str) -> bool:
    if left == right:
        return True
    try:
        return Decimal(left) == Decimal(right)
    except InvalidOperation:
        return False
