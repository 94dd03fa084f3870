"""verl.tools.function_tool: functions as tools, by a decorator."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_like.plugins.agents.tools import text
from verl_like.plugins.agents.tools.schema import schema_of
from verl_like.user_code import load_module

from .schemas import OpenAIFunctionToolSchema, ToolResponse


@dataclass
class FunctionTool:
    """A registered function."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters: dict[str, Any]) -> Any:
        """The function's value; a function that blocks runs in a thread."""
        return await (self.fn(**parameters) if self.is_async else asyncio.to_thread(self.fn, **parameters))


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}


def function_tool(name: Any = None, *, schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None) -> Any:
    """Register a function as a tool: @function_tool, @function_tool("name") or @function_tool(schema=...).

    Without a schema, it is made from the signature and the docstring. Returns the function itself. Raises ValueError
    where signature and docstring do not do, and for a name that another function has.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        own_name = name if isinstance(name, str) else function.__name__
        described = schema_of(function, own_name) if schema is None else schema
        if isinstance(described, dict):
            described = OpenAIFunctionToolSchema.model_validate(described)
        taken = FUNCTION_TOOL_REGISTRY.get(own_name)
        if taken is not None and taken.fn is not function:
            raise ValueError(f"two functions want to be the tool {own_name!r}: {taken.fn} and {function}")
        is_async = inspect.iscoroutinefunction(function)
        FUNCTION_TOOL_REGISTRY[own_name] = FunctionTool(own_name, function, described, is_async)
        return function

    return register(name) if callable(name) else register


def get_function_tool(name: str) -> FunctionTool:
    """A registered function; raises KeyError if there is none of that name."""
    return FUNCTION_TOOL_REGISTRY[name]


def load_function_tools_from_path(path: str) -> list[FunctionTool]:
    """Import a file: all tools that are registered then."""
    load_module(path, "function_tool_path")
    return list(FUNCTION_TOOL_REGISTRY.values())


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Split a function's value into (response, reward, metrics), of which the last two may be left out."""
    response, reward, metrics = text.split_value(ret)
    if not isinstance(response, ToolResponse):
        response = ToolResponse(text=text.to_text(response))
    return response, 0.0 if reward is None else float(reward), dict(metrics or {})
