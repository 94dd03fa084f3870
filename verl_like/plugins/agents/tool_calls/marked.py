"""Formats with markers and thinking, each read in one pass over the text from marker to marker."""

from __future__ import annotations

import re
from collections.abc import Callable

from verl_like.plugins.agents.tool_calls.call import Malformed, Parsed, Reading, ToolCall
from verl_like.plugins.agents.tool_calls.json_text import arguments_of, call_of, past_space, read_json

# (text, place behind the marker, where to add what is read) -> place behind the call; raises Malformed
ReadCall = Callable[[str, int, Reading], int]


def read_marked(text: str, tags: re.Pattern[str], read_call: ReadCall) -> Parsed:
    """Takes a text apart at its tags.

    tags: a pattern with the groups `call` (a call begins), `think` and `thought` (begin and end of thinking), and maybe
    `stray` (a tag that is wrong outside of a call, right behind a broken one).

    Calls inside thinking are not calls. Where thinking ends that was never begun (the prompt began it), all before it
    was thinking. A `thought` inside a call that can be read is text.
    """
    reading, place = Reading(), 0
    while tag := tags.search(text, place):
        reading.content.append(text[place : tag.start()])
        place = tag.end()
        if tag.lastgroup == "think":
            close = next((t for t in tags.finditer(text, place) if t.lastgroup == "thought"), None)
            reading.reasoning.append(text[place : close.start() if close else len(text)])
            place = close.end() if close else len(text)
        elif tag.lastgroup == "thought":
            if not reading.reasoning:
                reading = Reading(reasoning=[text[: tag.start()]])
        elif tag.lastgroup == "stray":
            reading.refuse(f"{tag[0]} outside of a call", text, tag.start())
        else:
            try:
                place = read_call(text, place, reading)
            except Malformed as problem:
                reading.refuse(problem, text, tag.start())
                place = _behind_broken(text, tags, max(place, problem.place))
    reading.content.append(text[place:])
    return reading.done()


def _behind_broken(text: str, tags: re.Pattern[str], place: int) -> int:
    """Return the position to go on at behind a broken call: the next opening tag, or the end of a stray closing one."""
    for tag in tags.finditer(text, place):
        if tag.lastgroup != "stray":
            return tag.start()
        if tag[0].startswith("</tool_call"):
            return tag.end()
    return len(text)


_HERMES_END = "</tool_call>"
_HERMES_TAGS = re.compile(r"(?P<call><tool_call>)|(?P<stray></tool_call>)|(?P<think><think>)|(?P<thought></think>)")


class Hermes:
    """Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`, as often as there are calls.

    Closing tags inside of strings are text. A call needs its closing tag: without it, it was cut off.
    """

    def parse(self, text: str) -> Parsed:
        return read_marked(text, _HERMES_TAGS, _read_hermes)


def _read_hermes(text: str, place: int, reading: Reading) -> int:
    call, end = read_json(text, past_space(text, place), call_of)
    close = past_space(text, end)
    if not text.startswith(_HERMES_END, close):
        raise Malformed(f"text between the JSON and {_HERMES_END}" if close < len(text) else f"no {_HERMES_END}", end)
    reading.calls.append(call)
    return close + len(_HERMES_END)


_QWEN3_CODER_TAGS = re.compile(
    r"(?P<call><tool_call>)|(?P<stray></tool_call>|<function=)|(?P<think><think>)|(?P<thought></think>)"
)
_FUNCTION = re.compile(r"\s*+<function=([^<>\n]++)>")
_PARAMETER = re.compile(r"\s*+<parameter=([^<>\n]++)>")
_VALUE_END = re.compile(r"(?P<close></parameter>)|<parameter=|<function=|<tool_call>")
_QWEN3_CODER_END = re.compile(r"\s*+</function>\s*+</tool_call>")


class Qwen3Coder:
    """Qwen3-Coder: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, with line breaks.

    Values are text, without the line break on either side.

    The syntax has no escapes: a value ends at the first `</parameter>`, and an opening tag in it means that its own end
    is missing.
    """

    def parse(self, text: str) -> Parsed:
        return read_marked(text, _QWEN3_CODER_TAGS, _read_qwen3_coder)


def _read_qwen3_coder(text: str, place: int, reading: Reading) -> int:
    function = _FUNCTION.match(text, place)
    if function is None:
        raise Malformed("no <function=NAME>")
    place, arguments = function.end(), dict[str, str]()
    while parameter := _PARAMETER.match(text, place):
        end = _VALUE_END.search(text, parameter.end())
        if end is None or not end["close"]:
            raise Malformed(f"no </parameter> of {parameter[1]}")
        if parameter[1] in arguments:
            raise Malformed(f"parameter {parameter[1]} twice")
        arguments[parameter[1]] = text[parameter.end() : end.start()].removeprefix("\n").removesuffix("\n")
        place = end.end()
    close = _QWEN3_CODER_END.match(text, place)
    if close is None:
        raise Malformed("no </function></tool_call> behind the parameters")
    reading.calls.append(ToolCall(name=function[1], arguments=arguments))
    return close.end()


_MISTRAL_TAGS = re.compile(r"(?P<call>\[TOOL_CALLS\])|(?P<think>\[THINK\])|(?P<thought>\[/THINK\])")
_NAME = re.compile(r"\s*+([^\s\[\]{}]++)\s*+(?:\[CALL_ID\][^\[{]*+)?+(?:\[ARGS\])?+\s*+")


class Mistral:
    """Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, ...]`, or `[TOOL_CALLS]f[ARGS]{"a": 1}` a call.

    The second form is that of version 11 of its tokenizer (also with `[CALL_ID]id`, or without `[ARGS]`). The text
    behind each `[TOOL_CALLS]` shows which one it is.
    """

    def parse(self, text: str) -> Parsed:
        return read_marked(text, _MISTRAL_TAGS, _read_calls)


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
