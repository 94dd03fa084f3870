"""Checks of a request: size bounds before it is parsed, then the JSON type of each field.

Fields that a schema does not name are not checked, and null counts as a field that was left out.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

from verl_like.plugins.agents.gateway.session import Refused

# No conversation that a context holds comes near these; what parsing, template and digests cost stays below a second.
MOST_DEPTH, MOST_ITEMS, MOST_DIGITS = 100, 100_000, 100
MOST_TEXTS = 64  # of stop texts, which an engine looks for at each token
_MARKS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{},]', re.DOTALL)
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a surrogate pair
_KINDS: dict[str, tuple[type, ...]] = {
    "a text": (str,),
    "true or false": (bool,),
    "a whole number": (int,),
    "a number": (int, float),
    "an object": (dict,),
}
_TEXT, _FLAG, _WHOLE, _NUMBER, _OBJECT = _KINDS
_PART = {"type!": _TEXT, "text": _TEXT, "refusal": _TEXT}
_CONTENT = (_TEXT, [_PART])
_FUNCTION = {"name": _TEXT, "description": _TEXT, "parameters": _OBJECT}
_COMMON = {
    **dict.fromkeys(("model", "user"), _TEXT),
    **dict.fromkeys(("stream", "parallel_tool_calls"), _FLAG),
    **dict.fromkeys(("n", "seed", "top_k", "max_tokens", "max_completion_tokens", "max_output_tokens"), _WHOLE),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), _NUMBER),
    "metadata": _OBJECT,
    "stop": (_TEXT, [_TEXT]),
    "stop_sequences": [_TEXT],
    "stream_options": {"include_usage": _FLAG},
    "tool_choice": (
        _TEXT,
        {"type!": _TEXT, "name": _TEXT, "function": {"name": _TEXT}, "disable_parallel_tool_use": _FLAG},
    ),
    **{name: {"type!": _TEXT} for name in ("response_format", "output_format")},
    **{name: {"format": {"type!": _TEXT}} for name in ("text", "output_config")},
}
CHAT: dict[str, Any] = _COMMON | {
    "messages!": [
        {
            **{"role!": _TEXT, "content": _CONTENT, "name": _TEXT, "tool_call_id": _TEXT},
            "tool_calls": [{"id": _TEXT, "function!": {"name!": _TEXT, "arguments": (_TEXT, _OBJECT)}}],
        }
    ],
    "tools": [{"type!": _TEXT, "function": _FUNCTION}],
}
_BLOCK = _PART | {"id": _TEXT, "name": _TEXT, "input": _OBJECT, "tool_use_id": _TEXT, "content": _CONTENT}
MESSAGES: dict[str, Any] = _COMMON | {
    "messages!": [{"role!": _TEXT, "content!": (_TEXT, [_BLOCK])}],
    "system": _CONTENT,
    "tools": [{"type": _TEXT, "name!": _TEXT, "description": _TEXT, "input_schema": _OBJECT}],
}
_ITEM = dict.fromkeys(("type", "id", "role", "name", "arguments", "call_id"), _TEXT)
RESPONSES: dict[str, Any] = _COMMON | {
    "input!": (_TEXT, [_ITEM | {"content": _CONTENT, "output": _CONTENT}]),
    **dict.fromkeys(("instructions", "previous_response_id"), _TEXT),
    "include": [_TEXT],
    "tools": [{"type!": _TEXT, **_FUNCTION}],
}


def read(data: bytearray, schema: dict[str, Any]) -> dict[str, Any]:
    """The object that these bytes are. Raises Refused, which names the field of another type."""
    _require_bounded(data, "the body")
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_object, parse_int=_whole, parse_float=_number, parse_constant=_number
        )
    except UnicodeDecodeError as error:
        raise Refused(f"the body is not UTF-8: byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise Refused(f"the body is not JSON: {error.msg} at character {error.pos}") from error
    if _HALF.search(data):  # half an emoji, where a program cut a text: no tokenizer takes it
        text = json.dumps(value, ensure_ascii=False)
        value = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    _check(value, schema, "")
    return value


def _require_bounded(data: bytes | bytearray, where: str) -> None:
    depth = items = 0
    for mark in _MARKS.finditer(data):
        found = mark[0][0]
        if found in b",[{":
            items += 1
            depth += found != ord(",")
        elif found in b"]}":
            depth -= 1
        if depth > MOST_DEPTH or items > MOST_ITEMS:
            raise Refused(f"{where} has more than {MOST_DEPTH} levels, or more than {MOST_ITEMS} items", param=where)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0][:60]
        raise Refused(f"{twice} stands twice in an object", param=twice)
    return found


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise Refused(f"a number has {len(text)} digits: at most {MOST_DIGITS}")
    return int(text)


def _number(text: str) -> float:
    value = float(text) if len(text) <= MOST_DIGITS else math.inf
    if not math.isfinite(value):
        raise Refused(f"{text[:20]} is no number that can be used")
    return value


def _check(value: Any, schema: Any, where: str, want: str = "") -> None:
    want = want or _want(schema)
    if isinstance(schema, tuple):
        schema = next((each for each in schema if _fits(value, each)), schema[0])
    if not _fits(value, schema):
        raise Refused(f"{where or 'the body'} must be {want}, not {_said(value)}", param=where or None)
    if isinstance(schema, list):
        if schema == [_TEXT] and len(value) > MOST_TEXTS:
            raise Refused(f"{where} has {len(value)} texts: at most {MOST_TEXTS}", param=where)
        for place, item in enumerate(value):
            _check(item, schema[0], f"{where}[{place}]")
    elif isinstance(schema, dict):
        for key, inner in schema.items():
            name = key.removesuffix("!")
            path = f"{where}.{name}" if where else name
            if value.get(name) is not None:
                _check(value[name], inner, path)
            elif key != name:
                raise Refused(f"{path} is missing", param=path)
    elif where.endswith(".arguments"):  # JSON in a text, which is parsed too
        _require_bounded(value.encode(), where)


def _fits(value: Any, schema: Any) -> bool:
    return type(value) in _KINDS[schema] if isinstance(schema, str) else isinstance(value, type(schema))


def _want(schema: Any) -> str:
    if isinstance(schema, tuple):
        return " or ".join(map(_want, schema))
    if isinstance(schema, list):
        return f"a list of {'texts' if schema[0] == _TEXT else 'objects'}"
    return schema if isinstance(schema, str) else _OBJECT


def _said(value: Any) -> str:
    return _OBJECT if isinstance(value, dict) else "a list" if isinstance(value, list) else json.dumps(value)[:60]
