"""verl.interactions.gsm8k_interaction: a user who asks again until the answer to a GSM8K problem is right."""

from __future__ import annotations

from typing import Any

from ..utils.reward_score import gsm8k
from .base import BaseInteraction

_RIGHT = "Your response is correct!"
_AGAIN = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """An episode is started with `ground_truth`. Its score is that of the number behind `####` in the last message."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._episodes: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> str:
        name = await super().start_interaction(instance_id)
        self._episodes[name] = {"ground_truth": ground_truth, "response": ""}
        return name

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        self._episodes[instance_id]["response"] = said[-1] or "" if said else ""
        score = await self.calculate_score(instance_id)
        return (True, _RIGHT, score, {}) if score == 1.0 else (False, _AGAIN, score, {})

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        episode = self._episodes[instance_id]
        return gsm8k.compute_score(episode["response"], episode["ground_truth"], method="strict")

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self._episodes[instance_id]
