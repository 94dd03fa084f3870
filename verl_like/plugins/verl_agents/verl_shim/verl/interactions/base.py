"""verl.interactions.base: the class that simulated users inherit from."""

from __future__ import annotations

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """One object for all episodes, each known by its id from `start_interaction` to `finalize_interaction`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = {"name": "interaction_agent", **config}["name"]

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """The id of a new episode. kwargs: the row's extra_info.interaction_kwargs."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Return (whether the conversation ends, the user's answer, the score of the model's turn, metrics)."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        """A score, for use of the class's own."""
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        """Forget an episode."""
