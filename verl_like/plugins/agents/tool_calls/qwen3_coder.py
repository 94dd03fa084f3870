"""Qwen3-Coder's XML: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, with line breaks."""

from __future__ import annotations

import re

from verl_like.plugins.agents.tool_calls.call import Malformed, Parsed, Reading, ToolCall
from verl_like.plugins.agents.tool_calls.marked import read_marked

_TAGS = re.compile(r"(?P<call><tool_call>)|(?P<stray></tool_call>|<function=)|(?P<think><think>)|(?P<thought></think>)")
_FUNCTION = re.compile(r"\s*+<function=([^<>\n]++)>")
_PARAMETER = re.compile(r"\s*+<parameter=([^<>\n]++)>")
_VALUE_END = re.compile(r"(?P<close></parameter>)|<parameter=|<function=|<tool_call>")
_END = re.compile(r"\s*+</function>\s*+</tool_call>")


class Qwen3Coder:
    """Values are text, without the line break on either side.

    The syntax has no escapes: a value ends at the first `</parameter>`, and an opening tag in it means that its own end
    is missing.
    """

    def parse(self, text: str) -> Parsed:
        return read_marked(text, _TAGS, _read_call)


def _read_call(text: str, place: int, reading: Reading) -> int:
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
    close = _END.match(text, place)
    if close is None:
        raise Malformed("no </function></tool_call> behind the parameters")
    reading.calls.append(ToolCall(name=function[1], arguments=arguments))
    return close.end()
