"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`, as often as there are calls."""

from __future__ import annotations

import re

from verl_like.plugins.agents.tool_calls.call import Malformed, Parsed, Reading
from verl_like.plugins.agents.tool_calls.json_text import call_of, past_space, read_json
from verl_like.plugins.agents.tool_calls.marked import read_marked

_END = "</tool_call>"
_TAGS = re.compile(r"(?P<call><tool_call>)|(?P<stray></tool_call>)|(?P<think><think>)|(?P<thought></think>)")


class Hermes:
    """Closing tags inside of strings are text. A call needs its closing tag: without it, it was cut off."""

    def parse(self, text: str) -> Parsed:
        return read_marked(text, _TAGS, _read_call)


def _read_call(text: str, place: int, reading: Reading) -> int:
    call, end = read_json(text, past_space(text, place), call_of)
    close = past_space(text, end)
    if not text.startswith(_END, close):
        raise Malformed(f"text between the JSON and {_END}" if close < len(text) else f"no {_END}", end)
    reading.calls.append(call)
    return close + len(_END)
