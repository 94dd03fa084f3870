"""Knights and knaves, and tool calls: right answers in their forms, near misses, and hostile text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from verl_like.plugins.text_grading import knights_and_knaves, tool_call

TRUTH = "Zoey is a knave, Noah is a knight"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (f"<think> Zoey is a knight? no </think><answer> {TRUTH} </answer>", 1.0),
        ("<answer>(1) Noah is a knight\n(2) Zoey is a knave</answer>", 1.0),
        ("So Noah is a knight. Zoey is a knave.", 1.0),
        ("Zoey is a knight at first sight, Noah is a knight, but no: Zoey is a knave.", 1.0),
        ("<answer> Zoey is a knave </answer> Noah is a knight", 0.0),
        ("<answer> Zoey is a knight, Noah is a knave </answer>", 0.0),
        ("</answer><answer>", 0.0),
        ("", 0.0),
    ],
)
def test_roles(text: str, score: float) -> None:
    assert knights_and_knaves.compute_score("knights_and_knaves", text, TRUTH)["score"] == score


def test_partial_credit_and_what_was_read() -> None:
    result = knights_and_knaves.compute_score("s", "Zoey is a knave, Noah is a knave", TRUTH, partial_credit=True)
    assert result == {"score": 0.5, "acc": 0.0, "pred": "Zoey: knave, Noah: knave"}
    with pytest.raises(ValueError, match="gives nobody a role"):
        knights_and_knaves.compute_score("s", "", "nobody")


CALL = {"name": "area", "arguments": {"shape": "Circle", "sizes": [1, 2.5], "round": True}}


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'area', 'arguments': CALL['arguments'] | arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (call(), 1.0),
        (call(shape=" circle "), 1.0),
        (call(sizes=[1.0, 2.5]), 1.0),
        ("first <tool_call>{}</tool_call> then " + call(), 1.0),
        (call(sizes=[1]), 0.0),
        (call(round=1), 0.0),  # True is not 1
        (call(more=0), 0.0),
        (call().replace("area", "volume"), 0.0),
        (call() + "<tool_call>{}</tool_call>", 0.0),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", 0.0),
        ('{"name": "area"}', 0.0),
    ],
)
def test_calls(text: str, score: float) -> None:
    for truth in (CALL, json.dumps(CALL)):
        assert tool_call.compute_score("tool_calls", text, truth)["score"] == score


def test_the_right_tool_may_earn_something() -> None:
    result = tool_call.compute_score("s", call(sizes=[]), CALL, name_score=0.25)
    assert (result["score"], result["acc"], result["name_acc"], result["format"]) == (0.25, 0.0, 1.0, 1.0)
    assert tool_call.compute_score("s", "no call", CALL, name_score=0.25)["score"] == 0.0
