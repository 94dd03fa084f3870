"""verl.tools.tool_registry: tools as objects, for agent loops that call them themselves."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl_like.plugins.agents.tools.kinds import NativeTool
from verl_like.plugins.agents.tools.loading import native_tools

from .base_tool import BaseTool
from .function_tool import load_function_tools_from_path
from .schemas import OpenAIFunctionToolSchema, ToolResponse


class ShippedTool(BaseTool):
    """A tool of the package's own, in verl's form. They give no rewards."""

    def __init__(self, tool: Any) -> None:
        self._native = NativeTool(tool)
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(self._native.schemas[0]))

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        session = instance_id or str(uuid4())
        row = {"prompt": [], "extra_info": {"tools_kwargs": {self.name: {"create_kwargs": kwargs}}}}
        begun = await self._native.begin(session, row)
        return session, ToolResponse(text=begun.text or None)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        outcome = await self._native.call(instance_id, self.name, parameters)
        return ToolResponse(text=outcome.text), outcome.reward or 0.0, dict(outcome.metrics)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._native.end(instance_id)


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """The objects of a YAML file's classes."""
    return [tool if hasattr(tool, "name") else ShippedTool(tool) for tool in native_tools(tools_config_file)]


def load_all_tools(tool_config_path: str | None, function_tool_path: str | None) -> list[Any]:
    """Classes and functions. Raises ValueError for two of one name."""
    tools = initialize_tools_from_config(tool_config_path) if tool_config_path else []
    tools += load_function_tools_from_path(function_tool_path) if function_tool_path else []
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"more than one tool is called {', '.join(twice)}; rename one")
    return tools
