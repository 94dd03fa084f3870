"""verl.tools.mcp_base_tool: what classes that read the results of MCP servers in their own way inherit from.

Calls are made by verl_like.plugins.agents.tools.mcp_tools, which takes nothing of a class but `_parse_tool_result`.
"""

from __future__ import annotations

from typing import Any

from .base_tool import BaseTool


class MCPBaseTool(BaseTool):
    """A tool of an MCP server."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        raise NotImplementedError("tools of MCP servers are called by the worker: write config.type: mcp")

    async def _call_tool(self, instance_id: str, parameters: dict[str, Any]) -> Any:
        raise NotImplementedError("tools of MCP servers are called by the worker: write config.type: mcp")

    def _parse_tool_result(self, content: list[Any]) -> tuple[str, dict[str, Any]]:
        """Text for the model, and metrics, of a result's parts."""
        return " ".join(part.text for part in content if part.type == "text"), {}
