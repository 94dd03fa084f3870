"""verl.tools.tool_registry: tools as objects, for agent loops that call them themselves."""

from __future__ import annotations

from typing import Any

from verl_like.episodes.tools.loading import native_tools

from .function_tool import load_function_tools_from_path


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """The objects of a YAML file's classes."""
    return native_tools(tools_config_file)


def load_all_tools(tool_config_path: str | None, function_tool_path: str | None) -> list[Any]:
    """Classes and functions. ValueError for two of one name."""
    tools = initialize_tools_from_config(tool_config_path) if tool_config_path else []
    tools += load_function_tools_from_path(function_tool_path) if function_tool_path else []
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"more than one tool is called {', '.join(twice)}; rename one")
    return tools
