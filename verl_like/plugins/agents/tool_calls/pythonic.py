"""Llama 3.2, Llama 4 and others: `[f(a=1, b="x"), g()]`, a Python list of calls with literals by keyword."""

from __future__ import annotations

import ast
import math
import re
import warnings
from typing import Any

from verl_like.plugins.agents.tool_calls.call import Malformed, Parsed, Reading, ToolCall
from verl_like.plugins.agents.tool_calls.json_text import MAX_DEPTH, MAX_DIGITS, past_space

_FILE = "<tool call>"
# Python warns of "\d" in a string, each time, under the name of the file that it was told.
warnings.filterwarnings("ignore", category=Warning, module=re.escape(_FILE))
_BEGIN = re.compile(r"(?:\A|<\|python_start\|>|<\|python_tag\|>)\s*+(?=\[\s*+[A-Za-z_][\w.]*+\()")
_MARK_END = "<|python_end|>"
# Strings first, the longer quotes before the shorter; one without an end takes the rest. Calls hold no comments and no
# backslashes outside of strings.
_STEP = re.compile(
    r'"""(?:[^"\\]++|\\.|"(?!""))*+(?:"""|\\?\Z)|\'\'\'(?:[^\'\\]++|\\.|\'(?!\'\'))*+(?:\'\'\'|\\?\Z)'
    r'|"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|\'(?:[^\'\\]++|\\.)*+(?:\'|\\?\Z)'
    r"|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<comma>,)|(?P<stop>[#\\;])",
    re.DOTALL,
)
_NAMES = {"true": True, "false": False, "null": None}  # as JSON spells them
_MAX_BITS = int(MAX_DIGITS * math.log2(10))


class Pythonic:
    """The list stands at the very beginning or behind `<|python_start|>`: elsewhere `[f(x)]` is mathematics."""

    def parse(self, text: str) -> Parsed:
        reading, place = Reading(), 0
        while begin := _BEGIN.search(text, place):
            reading.content.append(text[place : begin.start()])
            place = _read_list(text, begin.end() + 1, reading)
            if text.startswith(_MARK_END, past_space(text, place)):
                place = past_space(text, place) + len(_MARK_END)
        reading.content.append(text[place:])
        return reading.done()


def _read_list(text: str, place: int, reading: Reading) -> int:
    """Read one call after the other, so that the good ones count; return the position behind the list."""
    start, depth = place, 0
    for step in _STEP.finditer(text, place):
        kind = step.lastgroup
        if depth == 0 and (kind == "comma" or step[0] == "]"):
            try:
                if kind == "comma" or text[start : step.start()].strip():  # a comma may stand behind the last one
                    reading.calls.append(_call(text[start : step.start()].strip()))
            except Malformed as problem:
                reading.refuse(problem, text, start)
            start = step.end()
            if kind == "close":
                return start
        depth += (kind == "open") - (kind == "close")
        if depth < 0 or depth > MAX_DEPTH or kind == "stop":
            break
    reading.refuse(f"a list of calls without an end, or deeper than {MAX_DEPTH} levels", text, start)
    return len(text)


def _call(text: str) -> ToolCall:
    try:
        node = ast.parse(text, _FILE, "eval").body
        if not isinstance(node, ast.Call):
            raise Malformed("no call")
        names = [keyword.arg for keyword in node.keywords]
        if node.args or None in names:
            raise Malformed("an argument without a name")
        return ToolCall(name=_name(node.func), arguments=_dictionary(names, [word.value for word in node.keywords]))
    except SyntaxError as error:
        raise Malformed(f"not Python ({error.msg})") from None
    except (ValueError, RecursionError, MemoryError):  # a null character; Python's parser has a stack of its own
        raise Malformed("not Python that can be read") from None


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    raise Malformed("the name of a call is letters, digits and dots")


def _literal(node: ast.expr) -> Any:
    """A value of JSON's types: tuples become lists. Raises Malformed."""
    match node:
        case ast.Constant(value=bool() | None as value):
            return value
        case ast.Constant(value=str() as value):
            value.encode()  # half a surrogate pair is a ValueError
            return value
        case ast.Constant(value=int() | float() as value):
            return _number(value)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
            return -_number(value) if isinstance(sign, ast.USub) else _number(value)
        case ast.Name(id="true" | "false" | "null" as name):
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return _dictionary([_literal(key) if key else None for key in keys], values)
    raise Malformed(f"{type(node).__name__} is no literal")


def _dictionary(keys: list[Any], values: list[ast.expr]) -> dict[str, Any]:
    if not all(isinstance(key, str) for key in keys):
        raise Malformed("keys are strings")
    if len(set(keys)) < len(keys):
        raise Malformed("the same name twice")
    return {key: _literal(value) for key, value in zip(keys, values, strict=True)}


def _number(value: int | float) -> int | float:
    if not math.isfinite(value) if isinstance(value, float) else value.bit_length() > _MAX_BITS:
        raise Malformed("a number that is too large")
    return value
