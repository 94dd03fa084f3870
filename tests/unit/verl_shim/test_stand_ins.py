"""The stand-ins of verl's modules: what tool files do with them beyond what verl's own do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from verl_like.plugins.verl_agents.verl_shim.verl.tools import function_tool as functions
from verl_like.plugins.verl_agents.verl_shim.verl.tools.base_tool import BaseTool
from verl_like.plugins.verl_agents.verl_shim.verl.tools.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from verl_like.plugins.verl_agents.verl_shim.verl.utils.reward_score import geo3k, gsm8k

SCHEMA = {
    "type": "function",
    "function": {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}, "required": []}},
}


def test_a_schema_comes_out_as_it_went_in() -> None:
    schema = OpenAIFunctionToolSchema.model_validate(SCHEMA)
    assert schema.model_dump(exclude_unset=True, exclude_none=True) == SCHEMA
    assert schema.function.parameters.required == [] and schema.function.strict is False


def test_responses() -> None:
    assert ToolResponse().is_empty() and not ToolResponse(text="a").is_empty()
    assert ToolResponse(text="a").is_text_only() and not ToolResponse(text="a", image=[1]).is_text_only()
    with pytest.raises(ValueError, match="come in a list"):
        ToolResponse(image="a.png")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "arguments", "failed"), [('{"a": 1}', {"a": 1}, False), ("[1]", {}, True), ("{", {}, True)]
)
def test_calls_as_the_model_wrote_them(text: str, arguments: dict[str, Any], failed: bool) -> None:
    parsed = OpenAIFunctionParsedSchema(name="f", arguments=text)
    call, has_error = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert (call.name, call.arguments, has_error) == ("f", arguments, failed)


def test_the_base_class_does_nothing() -> None:
    tool = BaseTool({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
    assert tool.name == "f" and asyncio.run(tool.create("id")) == ("id", ToolResponse())
    assert asyncio.run(tool.create())[0] and asyncio.run(tool.calc_reward("id")) == 0.0
    assert asyncio.run(tool.execute("id", {}))[1:] == (0.0, {})


def test_a_name_belongs_to_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "FUNCTION_TOOL_REGISTRY", {})

    def one() -> str:
        """One."""
        return "1"

    assert functions.function_tool(one) is one
    assert functions.function_tool("two", schema=SCHEMA)(one) is one
    assert functions.get_function_tool("two").tool_schema.function.name == "f"
    with pytest.raises(ValueError, match="two functions want to be the tool 'one'"):
        functions.function_tool("one", schema=SCHEMA)(lambda: "2")


def test_scores() -> None:
    assert gsm8k.compute_score("so #### 1,000", "1000") == 1.0 and gsm8k.compute_score("1000", "1000") == 0.0
    assert gsm8k.extract_solution("it is 3", "flexible") == "3"
    boxed = "<think>hm</think> \\boxed{\\frac12}"
    assert geo3k.compute_score(boxed, "0.5") == pytest.approx(1.0)
    assert geo3k.compute_score("\\boxed{0.5}", "0.5") == pytest.approx(0.9)
    assert geo3k.compute_score("0.5", "\\frac{1}{2}", use_boxed=False, format_score=0.0) == 1.0
    assert geo3k.compute_score("0.5", "0.5") == 0.0
