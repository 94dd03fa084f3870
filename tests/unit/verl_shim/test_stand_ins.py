"""The stand-ins of verl's modules: what tool files do with them beyond what verl's own do."""

from __future__ import annotations

import asyncio
from pathlib import Path
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
from verl_like.plugins.verl_agents.verl_shim.verl.utils.reward_score import geo3k, gsm8k, math_dapo, math_reward
from verl_like.rewards.loading import load_scorer
from verl_like.rewards.reward_call import ScorerSpec
from verl_like.user_code import UserCodeError

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
    assert math_reward.compute_score("\\boxed{0.5}", "\\frac{1}{2}") == 1.0
    assert math_reward.is_equiv("0.5", "1/2") and not math_reward.is_equiv("0.5", None)
    right, boxed_only = "so\nAnswer: 0.5", "\\boxed{0.5}"
    assert [math_dapo.compute_score(said, "0.5")["score"] for said in (right, boxed_only)] == [1.0, -1.0]
    strict = [math_dapo.compute_score(said, "0.5", strict_box_verify=True)["acc"] for said in (right, boxed_only)]
    assert strict == [False, True]


def test_a_reward_function_falls_back_on_the_default_one(tmp_path: Path) -> None:
    """A number where verl's is one, so that a function may add to it."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl.utils.reward_score import default_compute_score\n\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    found = default_compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)\n"
        "    return found if isinstance(found, dict) else 0.5 + found\n"
    )
    score = load_scorer(ScorerSpec(path=str(file), timeout=5.0))
    assert score("openai/gsm8k", "#### 4", "4", {}) == 1.5
    graded = score("aime_2024", "Answer: 5", "4", {})
    assert (graded["score"], graded["acc"], graded["pred"]) == (-1.0, False, "5")
    for source in ("codecontests", "unknown"):
        with pytest.raises(NotImplementedError, match=f"data_source='{source}' has no grader that a function can call"):
            score(source, "", "4", {})


def test_what_has_no_stand_in_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from verl.protocol import DataProto\n")
    with pytest.raises(UserCodeError, match="verl is not installed here: copy what you need"):
        load_scorer(ScorerSpec(path=str(tmp_path / "mine.py"), timeout=5.0))
