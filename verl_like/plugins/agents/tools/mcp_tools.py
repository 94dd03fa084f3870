"""The tools of MCP servers as one ToolSource: which servers an entry of the tools' file names, and what they answer.

verl's form (`config.type: mcp`, servers in a JSON file), and a server written into the entry itself.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from verl_like.plugins.agents.tools.kinds import Stateless
from verl_like.plugins.agents.tools.mcp_client import McpServer, McpServerSettings
from verl_like.plugins.agents.tools.schema import plain_schema
from verl_like.plugins.agents.tools.tool_call import ToolOutcome
from verl_like.user_code import load_dotted, resolve_path

_PLAIN = ("mcp", "verl.tools.mcp_base_tool.MCPBaseTool")  # class names that have no way of their own to read results
_OURS = ("type", "tools", "mcp_servers_config_path", "tool_selected_list")
_SHARED = ("timeout", "start_timeout", "rate_limit")  # of all servers of an entry
_NOT_WITH_MCP = "this key is not known; a server has"

Reader = Callable[[list[Any]], tuple[str, Mapping[str, Any]]]


class McpTools(Stateless):
    """All tools of an entry's servers, or those that it selects, by the names that the servers give them.

    Servers belong to the worker, not to episodes: what one keeps between calls is seen by all.
    """

    def __init__(self, entry: Mapping[str, Any]) -> None:
        settings, verls = dict(entry.get("config") or {}), dict(entry.get("mcp") or {})
        path = verls.get("mcp_servers_config_path", settings.get("mcp_servers_config_path"))
        selected = verls.get("tool_selected_list", settings.get("tools", settings.get("tool_selected_list")))
        shared = {key: float(settings[key]) for key in _SHARED if settings.get(key) is not None}
        own = {key: value for key, value in settings.items() if key not in (*_OURS, *_SHARED)}
        found = {"mcp": own} if path is None else _servers_of(str(path))
        if path is not None and own:
            raise ValueError(f"config.{', config.'.join(own)} is for a server in the entry; {path} has the servers")
        self._servers: dict[str, McpServer] = {}  # by tool
        self.schemas: list[dict[str, Any]] = []
        for name, server in found.items():
            self._add(McpServer(_settings(name, {**shared, **server})), selected)
        if missing := [name for name in selected or () if name not in self._servers]:
            raise ValueError(f"there is no tool {', '.join(missing)}; the servers have: {', '.join(self._told)}")
        self._readers = {schema["function"]["name"]: _reader(entry, settings, schema) for schema in self.schemas}

    def _add(self, server: McpServer, selected: list[str] | None) -> None:
        self._told = [*getattr(self, "_told", []), *(tool.name for tool in server.tools)]
        for tool in server.tools:
            if selected is not None and tool.name not in selected:
                continue
            if tool.name in self._servers:
                raise ValueError(f"more than one MCP server has a tool {tool.name}; select tools, or rename one")
            self._servers[tool.name] = server
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            self.schemas.append(plain_schema({"type": "function", "function": function}))

    async def call(self, session: str, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        from mcp import MCPError

        try:
            result = await self._servers[name].call(name, arguments)
        except MCPError as error:
            return ToolOutcome(kind="exception", text=f"Error executing tool '{name}': {error}", message=str(error))
        if result.is_error:
            said, _ = plain_reader(result.content)
            return ToolOutcome(kind="exception", text=said, message=said)
        said, metrics = self._readers[name](result.content)
        return ToolOutcome(
            text=said, metrics={key: value for key, value in metrics.items() if isinstance(value, int | float)}
        )


def plain_reader(content: list[Any]) -> tuple[str, Mapping[str, Any]]:
    """All text of a result; what else it has is named."""
    return "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in content), {}


def _reader(entry: Mapping[str, Any], settings: dict[str, Any], schema: dict[str, Any]) -> Reader:
    """Choose the function that turns results into text: `_parse_tool_result` of the entry's class, if it names one."""
    name = entry["class_name"]
    if name in _PLAIN:
        return plain_reader
    make = load_dotted(name, "class_name")
    model = importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema.model_validate(schema)
    tool = make(config=settings, tool_schema=model)
    for method in ("execute", "_call_tool"):
        if getattr(type(tool), method).__module__ != "verl.tools.mcp_base_tool":
            raise ValueError(f"{name} has a method {method} of its own; of an MCP tool only _parse_tool_result is used")
    return tool._parse_tool_result


def _servers_of(path: str) -> dict[str, dict[str, Any]]:
    """Servers by name, of a JSON file {"mcpServers": {name: {...}}}."""
    key = "mcp_servers_config_path"
    with open(resolve_path(path, key), encoding="utf-8") as file:
        content = json.load(file)
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers or not all(isinstance(s, dict) for s in servers.values()):
        raise ValueError(f'{key}={path}: the file must hold {{"mcpServers": {{name: {{"command" or "url": ...}}}}}}')
    return servers


def _settings(name: str, given: dict[str, Any]) -> McpServerSettings:
    """A server of either form; the file's may have verl's auth_token and a transport."""
    transport = given.pop("transport", given.pop("type", None))
    if transport not in (None, "stdio", "http", "streamable-http", "streamable_http"):
        raise ValueError(f"MCP server {name!r}: transport={transport!r} is not supported; use stdio or streamable-http")
    if token := given.pop("auth_token", None):
        given["headers"] = {**given.get("headers", {}), "Authorization": f"Bearer {token}"}
    known = [each.name for each in fields(McpServerSettings) if each.name != "name"]
    if unknown := sorted(given.keys() - set(known)):
        raise ValueError(f"MCP server {name!r}: {unknown[0]}: {_NOT_WITH_MCP} {', '.join(known)}")
    if "args" in given:
        given["args"] = tuple(str(argument) for argument in given["args"])
    return McpServerSettings(name=name, **given)
