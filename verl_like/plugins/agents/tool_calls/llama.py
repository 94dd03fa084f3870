"""Llama 3: `{"name": "f", "parameters": {"a": 1}}`, several behind each other or with `;` between them.

`<|python_tag|>` before a call says that it is one. Without it, an object is a call where it has a name and parameters.
"""

from __future__ import annotations

import re
from typing import Any

from verl_like.plugins.agents.tool_calls.call import Malformed, Parsed, Reading, ToolCall
from verl_like.plugins.agents.tool_calls.json_text import call_of, past_space, read_json

_KEYS = ("arguments", "parameters")
_BEGIN = re.compile(r'(?P<tag><\|python_tag\|>)\s*+|\{(?=\s*+"(?:name|type|parameters|arguments)"\s*+:)')
_SEPARATOR = re.compile(r"\s*+;\s*+(?=\{|<\|python_tag\|>|\Z)")
# Not simply the next `{`: it may be an argument of the broken call.
_BEHIND_BROKEN = re.compile(r";\s*+(?=\{)|(?=<\|python_tag\|>)")


class Llama:
    """Python code behind `<|python_tag|>` (Llama's own tools) is not read: it is listed as malformed."""

    def parse(self, text: str) -> Parsed:
        reading, place = Reading(), 0
        while begin := _BEGIN.search(text, place):
            reading.content.append(text[place : begin.start()])
            start = begin.end() if begin["tag"] else begin.start()
            try:
                place = _read_call(text, start, reading, certain=bool(begin["tag"]))
            except Malformed as problem:
                reading.refuse(problem, text, start)
                found = _BEHIND_BROKEN.search(text, begin.end())
                place = problem.place or (found.end() if found else len(text))
        reading.content.append(text[place:])
        return reading.done()


def _read_call(text: str, start: int, reading: Reading, *, certain: bool) -> int:
    def call_or_none(value: Any) -> ToolCall | None:
        is_call = certain or ("name" in value and any(key in value for key in _KEYS))
        return call_of(value, _KEYS) if is_call else None

    call, end = read_json(text, start, call_or_none)
    if call is None:
        reading.content.append(text[start:end])
        return end
    if text.startswith("}", past_space(text, end)):
        raise Malformed("more closing brackets than opening ones", past_space(text, end) + 1)
    reading.calls.append(call)
    separator = _SEPARATOR.match(text, end)
    return separator.end() if separator else end
