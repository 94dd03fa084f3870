"""gpt-oss: messages with channels, `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>`.

Thinking is the channel `analysis`; what is said before a call (`commentary`) and the answer (`final`) are content.
"""

from __future__ import annotations

import re

from verl_like.plugins.agents.tool_calls.call import Malformed, Parsed, Reading, ToolCall
from verl_like.plugins.agents.tool_calls.json_text import arguments_of, past_space, read_json

_MESSAGE = "<|message|>"
_RECIPIENT = re.compile(r"(?<!\S)to=([^\s<]++)")  # in the part of the role, or in that of the channel
_CHANNEL = re.compile(r"<\|channel\|>\s*+(\w++)")
_BODY_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)|\Z")


class Harmony:
    """A call is addressed to `functions.NAME`, on whichever channel; another recipient is malformed."""

    def parse(self, text: str) -> Parsed:
        reading, place = Reading(), 0
        while (body := text.find(_MESSAGE, place)) >= 0:
            place = _read_message(text, place, body, reading)
        _read_rest(text, place, reading)
        return reading.done()


def _read_message(text: str, start: int, body: int, reading: Reading) -> int:
    """One message: its header begins at `start`. Returns the place behind it."""
    header, body = text[start:body], body + len(_MESSAGE)
    recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
    if recipient:
        try:
            call, place = _read_call(text, body, recipient[1])
            reading.calls.append(call)
            return place
        except Malformed as problem:
            reading.refuse(problem, text, start)
            body = max(body, problem.place)
    end = _BODY_END.search(text, body)
    assert end is not None
    if not recipient:
        part = reading.reasoning if channel and channel[1] == "analysis" else reading.content
        part.append(text[body : end.start()])
    return end.end()


def _read_call(text: str, body: int, recipient: str) -> tuple[ToolCall, int]:
    name = recipient.removeprefix("functions.")
    if name in ("", recipient):
        raise Malformed(f"{recipient} is no functions.NAME")
    arguments, end = read_json(text, past_space(text, body), arguments_of)
    close = _BODY_END.match(text, past_space(text, end))
    if close is None:
        raise Malformed("text behind the arguments", end)
    return ToolCall(name=name, arguments=arguments), close.end()


def _read_rest(text: str, place: int, reading: Reading) -> None:
    """Read the text behind the last message.

    Text without any header is content; a header alone says nothing unless it is a call's.
    """
    rest = text[place:]
    if _RECIPIENT.search(rest) and "<|channel|>" in rest:
        reading.refuse(f"no {_MESSAGE}", text, place)
    elif "<|" not in rest:
        reading.content.append(rest)
