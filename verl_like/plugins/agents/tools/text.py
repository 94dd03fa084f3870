"""Conversion of a tool's value to text for the model, a reward and metrics: pure functions, no third-party packages."""

from __future__ import annotations

import json
import math
from typing import Any

from verl_like.rewards.reward_call import is_finite_reward
from verl_like.text import whole

MOST_CHARS = 1 << 20  # of any text that leaves a worker
_METRIC_CHARS, _MOST_METRICS = 500, 100
SIDES = ("left", "middle", "right")


def truncate(text: str, length: int, side: str) -> str:
    """Cut a text to `length` characters, with a mark where the rest was: verl's form.

    side: the part that is cut. Of an odd length, "middle" keeps one character less, but never none.
    """
    if side not in SIDES:
        raise ValueError(f"tool_response_truncate_side={side!r}: must be one of {', '.join(SIDES)}")
    if length < 1:
        raise ValueError(f"max_tool_response_length={length}: must be at least 1")
    if len(text) <= length:
        return text
    if side == "left":
        return "(truncated)..." + text[-length:]
    if side == "right":
        return text[:length] + "...(truncated)"
    half = length // 2
    return text[: max(1, half)] + "...(truncated)..." + text[len(text) - half :]


def to_text(value: Any) -> str:
    """A tool's value as the model reads it. Anything with a `text` is verl's ToolResponse; dicts become JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):  # of no JSON type, or inside itself
            return str(value)
    if hasattr(value, "text") and (hasattr(value, "image") or hasattr(value, "video")):
        media = [f"[{len(getattr(value, n))} {n}]" for n in ("image", "video") if getattr(value, n, None)]
        return "\n".join([*([value.text] if value.text else []), *media])
    return str(value)


def plain_text(text: str, length: int | None, side: str) -> str:
    """A text that may leave the worker: bounded, Python's own str, and encodable whatever the tool put into it."""
    bounded = truncate(text, MOST_CHARS, "middle")
    if length is not None:
        bounded = truncate(text, min(length, MOST_CHARS), side)
    return whole(str.__str__(bounded))


def to_reward(value: Any) -> float | None:
    """A reward as a number, None where there is none. Raises ValueError for what is no finite number."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several elements
        number = math.nan
    if not is_finite_reward(number):
        raise ValueError(f"the reward must be a finite number, also as a 32-bit float, not {value!r:.200}")
    return number


def to_metrics(value: Any) -> dict[str, float | str | None]:
    """A dict of numbers and short texts; empty for anything but a dict."""
    if not isinstance(value, dict):
        return {}
    return {str(key)[:_METRIC_CHARS]: _plain(item) for key, item in list(value.items())[:_MOST_METRICS]}


def _plain(value: Any) -> float | str | None:
    if value is None or isinstance(value, str):
        return value and value[:_METRIC_CHARS]
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)[:_METRIC_CHARS]


def has_reward(value: Any) -> bool:
    """True where an environment's method returned (text, reward), perhaps with metrics, and not a tuple of data."""
    return isinstance(value, tuple) and len(value) in (2, 3) and type(value[1]) in (int, float)


def split_value(value: Any) -> tuple[Any, Any, Any]:
    """Split a tool's value into (response, reward, metrics), of which the last two may be left out: verl's rule."""
    if not isinstance(value, tuple):
        return value, None, None
    if not 1 <= len(value) <= 3:
        raise TypeError(f"a tool's tuple is (response, reward, metrics) or its beginning, not {len(value)} values")
    response, reward, metrics = (*value, None, None)[:3]
    return response, reward, metrics
