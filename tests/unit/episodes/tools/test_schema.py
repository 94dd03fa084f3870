"""Schemas from signatures, checks of arguments, and what becomes of values: pure functions."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional, Union

import pytest

from verl_like.plugins.agents.tools import text
from verl_like.plugins.agents.tools.schema import bad_arguments, plain_schema, schema_of, typed

# ruff: noqa: UP007, UP045  the older spellings of unions are what is tested


def everything(
    a: int,
    b: Optional[str],
    c: Union[int, float],
    d: Literal["x", "y"],
    e: list[dict[str, int]],
    f: tuple[int, str],
    g: dict,
    h: Any,
    i: bool | None = None,
    j: Union[list[int], str] = "",
    k: Literal[1, "two"] = 1,
    m: list = (),  # type: ignore[assignment]
) -> str:
    """Does everything.

    And more: a second
    paragraph.

    Args:
        a: The first
            of them
        b: The second (choices: ["p", "q"])
        c: Third: with a colon
        d: D
        e: E
        f: F
        g: G

        h: H
        i: I
        j: J
        k: K
        m: M

    Returns:
        Nothing of interest.

    Raises:
        ValueError: never.
    """
    return ""


def small(n: int) -> int:
    """Small.

    Args:
        n: A number."""
    return n


class Thing:
    def method(self, word: str) -> None:
        """A method.

        Args:
            word: A word.
        """


@pytest.mark.parametrize("function", [everything, small, Thing().method])
def test_schemas_are_those_of_transformers(function: Callable[..., Any]) -> None:
    from transformers.utils import get_json_schema

    theirs = get_json_schema(function)
    theirs["function"].pop("return", None)  # verl leaves it out as well
    assert schema_of(function, function.__name__) == theirs


def test_other_spellings_of_a_docstring() -> None:
    def tool(a: Annotated[int, "odd"], b: str = ""):
        """
        Summary.

        Arguments:
            a (int): The first.
            b (str, optional): The
                second.

        Example:
            a: no argument
        """

    made = schema_of(tool, "other")["function"]
    assert (made["name"], made["description"], made["parameters"]["required"]) == ("other", "Summary.", ["a"])
    assert made["parameters"]["properties"] == {
        "a": {"type": "integer", "description": "The first."},
        "b": {"type": "string", "description": "The second."},
    }


def test_definitions_that_make_no_schema() -> None:
    def rest(*words: str):
        """Doc."""

    def odd(path: os.PathLike):
        """Doc."""

    with pytest.raises(ValueError, match=r"tool 'x': argument \*words: 'str' has no name"):
        schema_of(rest, "x")
    with pytest.raises(ValueError, match=r"argument 'path' has the type .*PathLike.*, which JSON has no form for"):
        schema_of(odd, "x")
    with pytest.raises(ValueError, match="must name it"):
        plain_schema({"type": "function", "function": {}})
    with pytest.raises(ValueError, match="a tool's schema is"):
        plain_schema(["x"])


def test_arguments_are_checked_by_name() -> None:
    schema = schema_of(small, "small")
    assert bad_arguments(schema, {"n": "of another type"}) == ""
    assert bad_arguments(schema, {"n": 1, "more": 2}) == "Invalid arguments for 'small': unknown more. It takes: n"
    assert bad_arguments(schema, {}) == "Invalid arguments for 'small': missing n. It takes: n"
    schema["function"]["parameters"]["additionalProperties"] = True
    assert bad_arguments(schema, {"n": 1, "more": 2}) == ""
    assert bad_arguments({"function": {"name": "bare"}}, {}) == ""


@pytest.mark.parametrize(
    ("side", "length", "expected"),
    [
        ("left", 4, "(truncated)...6789"),
        ("right", 4, "0123...(truncated)"),
        ("middle", 4, "01...(truncated)...89"),
        ("middle", 5, "01...(truncated)...89"),  # as verl has it
        ("middle", 1, "0...(truncated)..."),  # verl gives the whole text
        ("left", 1, "(truncated)...9"),
        ("middle", 10, "0123456789"),
    ],
)
def test_long_texts_are_cut_as_verl_cuts_them(side: str, length: int, expected: str) -> None:
    assert text.truncate("0123456789", length, side) == expected
    assert text.plain_text("0123456789", length, side) == expected


def test_truncation_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="tool_response_truncate_side='top'"):
        text.truncate("abc", 2, "top")
    with pytest.raises(ValueError, match="max_tool_response_length=0"):
        text.truncate("abc", 0, "left")
    assert len(text.plain_text("x" * 3_000_000, None, "left")) < 1_100_000
    assert len(text.plain_text("x" * 3_000_000, 2_000_000, "left")) < 1_100_000


def test_values_become_text_rewards_and_metrics() -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    assert text.to_text(loop) == "{'loop': {...}}"
    assert text.to_text([1, "a"]) == "[1, 'a']"
    assert text.to_reward(True) == 1.0 and text.to_reward(None) is None
    with pytest.raises(ValueError, match="must be a finite number"):
        text.to_reward("1")
    assert text.to_metrics({1: 2, "s": "t" * 900, "o": [1], "big": 10**400}) == {
        "1": 2.0,
        "s": "t" * 500,
        "o": "[1]",
        "big": "1" + "0" * 400,
    }
    assert text.to_metrics([1]) == {} and len(text.to_metrics({i: i for i in range(500)})) == 100
    assert text.split_value(("a",)) == ("a", None, None) and text.split_value("a") == ("a", None, None)
    with pytest.raises(TypeError, match="not 0 values"):
        text.split_value(())


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        ("integer", "6", 6),
        ("integer", "6.5", "6.5"),
        ("integer", "true", "true"),
        ("number", "6", 6),
        ("number", "1e3", 1000.0),
        ("boolean", "True", True),
        ("boolean", "1", "1"),
        ("array", "[1, 2]", [1, 2]),
        ("object", '{"a": 1}', {"a": 1}),
        ("object", "[" * 100_000, "[" * 100_000),
        ("string", "6", "6"),
        (["integer", "null"], "6", "6"),
        (None, "6", "6"),
    ],
)
def test_text_becomes_what_the_schema_declares(kind: object, given: str, meant: object) -> None:
    schema = {"function": {"name": "f", "parameters": {"properties": {"a": {"type": kind}}}}}
    found = typed(schema, {"a": given, "undeclared": "6"})
    assert found == {"a": meant, "undeclared": "6"} and type(found["a"]) is type(meant)
