"""What chat templates are given, in the forms that they want, and how their renderings are compared."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from verl_like.data.chat import PromptEncoder

_SHOWN = 40  # characters of each side of a difference
_TAG = 24  # characters of a tag at most

Message = dict[str, Any]


def forms(message: Message) -> list[Message]:
    """The message with its calls' arguments as objects, which most templates expect and servers give them, then as
    JSON, as OpenAI has them; without content, with "" and then None. Itself if it has no calls."""
    if not message.get("tool_calls"):
        return [message]
    contents = [message["content"]] if message.get("content") else ["", None]
    calls = [[_with_arguments(call, to) for call in message["tool_calls"]] for to in (_as_object, _as_json)]
    return [{**message, "content": content, "tool_calls": given} for given in calls for content in contents]


def without_calls(messages: list[Message]) -> list[Message]:
    """The same messages, as if no tool had been called."""
    return [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]


def with_stopped_clock(encoder: PromptEncoder) -> PromptEncoder:
    """The same, with one time for the whole conversation: a date that changes at midnight would rewrite history."""
    template = encoder.template_kwargs.get("chat_template") or encoder.tokenizer.chat_template
    if not encoder.has_template or "strftime_now" not in str(template):
        return encoder
    clock = {"strftime_now": datetime.now().strftime}
    stopped = copy.copy(encoder)
    stopped.template_kwargs = {**clock, **encoder.template_kwargs}
    return stopped


def first_difference(one: str, other: str) -> int:
    """Where two texts begin to differ; the length of the shorter one if it is the beginning of the other."""
    places = (place for place, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(places, min(len(one), len(other)))


def difference(said: str, whole: str) -> str:
    """Both texts where they begin to differ, with the start of the tag that they are in."""
    place = first_difference(said, whole)
    tag = said.rfind("<", max(0, place - _TAG), place)
    place = tag if tag >= 0 and ">" not in said[tag:place] else place
    return f"{said[place : place + _SHOWN]!r} became {whole[place : place + _SHOWN]!r}"


def _with_arguments(call: Message, convert: Callable[[Any], Any]) -> Message:
    if "function" in call:
        return {**call, "function": _with_arguments(call["function"], convert)}
    return {**call, "arguments": convert(call.get("arguments"))}


def _as_object(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):  # what the model wrote need not be JSON
        return arguments


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
