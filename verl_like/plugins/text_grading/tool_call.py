"""A tool call: the right tool with the right arguments, in the form that Hermes and Qwen models use.

The call is the JSON of the last <tool_call> ... </tool_call>. ground_truth: {"name", "arguments"}, also as JSON text.
Arguments are compared by value: 1 and 1.0 are equal, text regardless of case and surrounding space.
"""

from __future__ import annotations

import json
from typing import Any

from verl_like.plugins.math_grading.truth import dictionary_with

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PRED_CHARS = 1000


def extract_call(solution_str: str) -> dict[str, Any] | None:
    """The last call of a response, None if there is none that can be read."""
    end = solution_str.rfind(_CLOSE)
    start = solution_str.rfind(_OPEN, 0, max(end, 0))
    if start < 0:
        return None
    try:
        call = json.loads(solution_str[start + len(_OPEN) : end])
    except (ValueError, RecursionError):
        return None
    return call if isinstance(call, dict) and isinstance(call.get("name"), str) else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    name_score: float = 0.0,
) -> dict[str, Any]:
    """Score 1 for the call, `name_score` for the right tool with other arguments, else 0. Also name_acc and format."""
    expected = dictionary_with(ground_truth, "name")
    call = extract_call(solution_str)
    named = call is not None and call["name"] == expected["name"]
    right = call is not None and named and _same(call.get("arguments") or {}, expected.get("arguments") or {})
    return {
        "score": 1.0 if right else name_score * named,
        "acc": float(right),
        "name_acc": float(named),
        "format": float(call is not None),
        "pred": json.dumps(call, sort_keys=True, ensure_ascii=False)[:_PRED_CHARS] if call else "",
    }


def _same(given: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        keys_match = isinstance(given, dict) and given.keys() == expected.keys()
        return keys_match and all(_same(given[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        lengths_match = isinstance(given, list) and len(given) == len(expected)
        return lengths_match and all(_same(a, b) for a, b in zip(given, expected, strict=True))
    if isinstance(expected, str) and isinstance(given, str):
        return given.strip().lower() == expected.strip().lower()
    return isinstance(given, bool) == isinstance(expected, bool) and given == expected
