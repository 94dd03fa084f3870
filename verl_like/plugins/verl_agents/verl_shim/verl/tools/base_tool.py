"""verl.tools.base_tool: the class that tools of verl's form inherit from."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from .schemas import OpenAIFunctionToolSchema, ToolResponse


class BaseTool:
    """One object for all episodes; an episode has an instance of it, by id, from `create` to `release`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema: Any = tool_schema
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no schema: write one in the YAML file (tool_schema)")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The tool's own schema, where the YAML file has none."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """The id of a new instance, and what the model is told of it."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Carry out one call; return (response, reward of this step, metrics)."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        """The reward of the episode."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget an instance."""
