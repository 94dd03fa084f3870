"""verl.tools.gsm8k_tool: lets the model submit its answer to a GSM8K problem, and tells it whether that is right."""

from __future__ import annotations

from typing import Any

from ..utils.reward_score import gsm8k
from .base_tool import BaseTool
from .schemas import ToolResponse

_WORSE = -0.05  # for a submission that is no better than the one before


class Gsm8kTool(BaseTool):
    """An instance is created with `ground_truth`. Its reward is that of the last submission."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._episodes: dict[str, dict[str, Any]] = {}

    async def create(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> Any:
        name, response = await super().create(instance_id)
        self._episodes[name] = {"ground_truth": ground_truth, "answer": "", "reward": 0.0}
        return name, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        episode, answer = self._episodes[instance_id], str(parameters.get("answer", ""))
        episode["answer"] = answer if answer.startswith("#### ") else f"#### {answer}"
        before, reward = episode["reward"], await self.calc_reward(instance_id)
        episode["reward"] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), 0.0 if reward > before else _WORSE, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        episode = self._episodes[instance_id]
        return gsm8k.compute_score(episode["answer"], episode["ground_truth"], method="flexible")

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._episodes[instance_id]
