"""JSON inside a longer text: where a value ends, and what it says, read strictly."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

from verl_like.plugins.agents.tool_calls.call import Malformed, ToolCall

T = TypeVar("T")

MAX_DEPTH = 64  # what tools do with the arguments (copy, dump, compare) recurses as well
MAX_DIGITS = 4300  # Python's own limit, which other packages switch off
# A string may hold anything; one without an end takes the rest of the text. What `stop` names is not found in JSON
# outside of strings. Without it `\"` repeated would let every broken call scan to the end of the text.
_STEP = re.compile(
    r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|(?P<open>\{|\[(?![A-Z]))|(?P<close>[}\]])|(?P<stop>[;<\\\[])', re.DOTALL
)
_SPACE = re.compile(r"\s*+")


def past_space(text: str, place: int) -> int:
    """Return the first position from `place` on that holds no white space."""
    match = _SPACE.match(text, place)
    assert match is not None
    return match.end()


def json_end(text: str, start: int) -> int:
    """Return the end of the object or list that begins at `start`. Raises Malformed.

    Brackets in strings do not count.
    """
    if text[start : start + 1] not in ("{", "["):
        raise Malformed("no JSON object")
    depth = 0
    for step in _STEP.finditer(text, start):
        if step.lastgroup == "open":
            depth += 1
        elif step.lastgroup == "close":
            depth -= 1
        elif step.lastgroup == "stop":
            break
        if depth == 0:
            return step.end()
        if depth > MAX_DEPTH:
            raise Malformed(f"nested deeper than {MAX_DEPTH} levels")
    raise Malformed("JSON without an end (cut off, or a bracket or a quote is missing)")


def read_json(text: str, start: int, read: Callable[[Any], T]) -> tuple[T, int]:
    """Parse the JSON at `start` with `read`, and return the result and the position behind it.

    Raises Malformed, which carries that position where the JSON has an end.
    """
    end = json_end(text, start)
    try:
        return read(json_value(text[start:end])), end
    except Malformed as problem:
        problem.place = end
        raise


def json_value(text: str) -> Any:
    """The value of a text that holds nothing else. Raises Malformed."""
    try:
        value = _DECODER.decode(text)
        if "\\u" in text:  # half a surrogate pair is a str that nothing downstream can encode
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise Malformed(f"no valid JSON ({error.msg} at character {error.pos})") from None
    except UnicodeEncodeError:
        raise Malformed("half of a surrogate pair in a string") from None
    except RecursionError:  # the caller's own stack was deep already
        raise Malformed("nested too deeply") from None
    return value


def call_of(value: Any, keys: tuple[str, ...] = ("arguments",)) -> ToolCall:
    """The call in {"name": ..., "arguments": {...}}; the first of `keys` that is there holds the arguments.

    Other fields are left aside. Raises Malformed.
    """
    if not isinstance(value, dict):
        raise Malformed(f"a call is a JSON object, this is {_kind(value)}")
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise Malformed("no name")
    key = next((key for key in keys if key in value), None)
    if key is None:
        raise Malformed(f"no {' or '.join(keys)}")
    return ToolCall(name=value["name"], arguments=arguments_of(value[key]))


def arguments_of(value: Any) -> dict[str, Any]:
    """Read a call's arguments: an object, or a string that holds one as JSON (encoded twice). Raises Malformed."""
    if isinstance(value, str) and value.strip().startswith("{"):
        text = value.strip()
        if json_end(text, 0) != len(text):
            raise Malformed("text after the arguments")
        value = json_value(text)
    if not isinstance(value, dict):
        raise Malformed(f"arguments are an object, these are {_kind(value)}")
    return value


def finite(digits: str) -> float:
    """Read a number with a fraction or an exponent. Raises Malformed for one too large for a float."""
    number = float(digits)
    if not math.isfinite(number):
        raise Malformed("a number too large for a float")
    return number


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise Malformed(f"an integer of more than {MAX_DIGITS} digits")
    return int(digits)


def _constant(name: str) -> None:
    raise Malformed(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):  # readers disagree about which one counts
        raise Malformed("the same key twice in one object")
    return value


def _kind(value: Any) -> str:
    names = {str: "a string", list: "a list", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_float=finite, parse_constant=_constant)
