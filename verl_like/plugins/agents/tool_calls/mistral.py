"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, ...]`, and since version 11 of its tokenizer
`[TOOL_CALLS]f[ARGS]{"a": 1}` for each call (also with `[CALL_ID]id`, or without `[ARGS]`)."""

from __future__ import annotations

import re

from verl_like.plugins.agents.tool_calls.call import Malformed, Parsed, Reading, ToolCall
from verl_like.plugins.agents.tool_calls.json_text import arguments_of, call_of, past_space, read_json
from verl_like.plugins.agents.tool_calls.marked import read_marked

_TAGS = re.compile(r"(?P<call>\[TOOL_CALLS\])|(?P<think>\[THINK\])|(?P<thought>\[/THINK\])")
_NAME = re.compile(r"\s*+([^\s\[\]{}]++)\s*+(?:\[CALL_ID\][^\[{]*+)?+(?:\[ARGS\])?+\s*+")


class Mistral:
    """Parser of both forms: the text behind each `[TOOL_CALLS]` shows which one it is."""

    def parse(self, text: str) -> Parsed:
        return read_marked(text, _TAGS, _read_calls)


def _read_calls(text: str, place: int, reading: Reading) -> int:
    start = past_space(text, place)
    if text.startswith("[", start):
        return _read_list(text, start, reading)
    name = _NAME.match(text, place)
    start = name.end() if name else start
    if not text.startswith("{", start):
        raise Malformed("no list of calls, and no name with arguments")
    if name:
        arguments, end = read_json(text, start, arguments_of)
        call = ToolCall(name=name[1], arguments=arguments)
    else:
        call, end = read_json(text, start, call_of)
    if text.startswith(("}", "]"), past_space(text, end)):
        raise Malformed("more closing brackets than opening ones", end)
    reading.calls.append(call)
    return end


def _read_list(text: str, place: int, reading: Reading) -> int:
    """Read one call after the other, so that the good ones count."""
    separator = "["
    while separator != "]":
        start = past_space(text, place + 1)
        if separator == "[" and text.startswith("]", start):
            raise Malformed("an empty list of calls", start)
        try:
            call, end = read_json(text, start, call_of)
            reading.calls.append(call)
        except Malformed as problem:
            if not problem.place:  # nobody knows where the next one begins
                raise Malformed(str(problem), start) from None
            reading.refuse(problem, text, start)
            end = problem.place
        place = past_space(text, end)
        separator = text[place : place + 1]
        if separator not in (",", "]"):
            raise Malformed("a list of calls without an end", place)
    return place + 1
