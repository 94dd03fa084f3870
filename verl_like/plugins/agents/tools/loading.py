"""Finds the tools that a ToolSpec names, in a worker. Raises ToolError with key, value and the line that failed."""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_like.plugins.agents.tools.environments import EnvironmentWorker
from verl_like.plugins.agents.tools.interactions import Interactions, load_interactions
from verl_like.plugins.agents.tools.kinds import Environment, FunctionTool, NativeTool, StatelessTool, ToolSource
from verl_like.plugins.agents.tools.mcp_tools import McpTools
from verl_like.plugins.agents.tools.tool_call import KEYS, ToolError, ToolSpec
from verl_like.plugins.agents.tools.yaml_files import load_yaml
from verl_like.plugins.games.adapters import ADAPTERS
from verl_like.plugins.games.forms import is_environment
from verl_like.plugins.games.games import make as make_game
from verl_like.user_code import find_stand_ins, load, load_dotted, load_module

_PACKAGE = str(Path(__file__).parents[3])
_SHIPPED = {
    "calculator": "verl_like.plugins.agents.tools.calculator:Calculator",
    "code_interpreter": "verl_like.plugins.agents.tools.code_interpreter:CodeInterpreter",
    "http": "verl_like.plugins.agents.tools.http_service:HttpService",
    "search": "verl_like.plugins.agents.tools.search:Search",
}
_TRACEBACK_LINES = 3


def load_tools(spec: ToolSpec) -> list[ToolSource]:
    """The tools of all sources, each of another name."""
    find_stand_ins()
    sources: list[ToolSource] = []
    if spec.tool_config_path is not None:
        where = f"{KEYS}tool_config_path={spec.tool_config_path}"
        entries = _entries(spec.tool_config_path)
        sources += [_source(entry, f"{where}: tools[{place}]") for place, entry in enumerate(entries)]
    if spec.function_tool_path is not None:
        sources += _function_tools(spec.function_tool_path, f"{KEYS}function_tool_path")
    if spec.environment_path is not None:
        sources.append(_environment(spec.environment_path))
    if spec.environments:
        sources.append(_environments(spec))
    if spec.interaction_config_path is not None:
        key = f"{KEYS}interaction_config_path"
        with _blamed(f"{key}={spec.interaction_config_path}"):
            sources.append(Interactions(load_interactions(spec.interaction_config_path, key)))
    names = [schema["function"]["name"] for source in sources for schema in source.schemas]
    if sum(isinstance(source, EnvironmentWorker | Interactions) for source in sources) > 1:
        raise ToolError(f"{spec.source}: only one of these can answer the model's messages; leave the others out")
    if not sources:
        raise ToolError(
            f"no tools: set {KEYS}tool_config_path, function_tool_path, environment_path or interaction_config_path"
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ToolError(f"{spec.source}: more than one tool is called {', '.join(twice)}; rename one")
    return sources


def _environment(path: str) -> ToolSource:
    """A class whose methods are tools, or one that answers messages; the latter may be an adapter's too."""
    key = f"{KEYS}environment_path"
    adapted = path.partition(":")[0] in ADAPTERS
    make = None if adapted else load(path, key)
    if not (adapted or isinstance(make, type)):
        raise ToolError(f"{key}={path} is a {type(make).__name__}; name a class with reset(**row), or init and step")
    with _blamed(f"{key}={path}"):
        if adapted:
            make_game(path, {}, key)
        return Environment(make) if make is not None and not is_environment(make) else EnvironmentWorker(path)


def _environments(spec: ToolSpec) -> EnvironmentWorker:
    """Make the environment worker. Each environment is built once as a trial, so that mistakes are told now."""
    worker = EnvironmentWorker if spec.worker_cls is None else load(spec.worker_cls, "env.worker_cls")
    if not (isinstance(worker, type) and issubclass(worker, EnvironmentWorker)):
        name = f"{EnvironmentWorker.__module__}.{EnvironmentWorker.__name__}"
        raise ToolError(f"env.worker_cls={spec.worker_cls}: derive the class from {name}")
    for kind, config in spec.environments:
        with _blamed(f"env.train.tags, env.val.tags or env.custom: {kind}"):
            make_game(kind, json.loads(config), "env.custom.<tag>.type")
    return worker()


def native_tools(path: str) -> list[Any]:
    """The objects of the classes that multi_turn.tool_config_path lists: agent loops call them themselves."""
    where = f"{KEYS}tool_config_path={path}"
    entries = [_read(entry, f"{where}: tools[{place}]") for place, entry in enumerate(_entries(path))]
    if any(kind == "mcp" for *_, kind in entries):
        raise ToolError(
            f"{where}: it lists MCP servers, whose tools agent loops of your own cannot call; leave them out"
        )
    return [_object(entry, where) for entry, where, _ in entries]


def _entries(path: str) -> list[Any]:
    key = f"{KEYS}tool_config_path"
    content = load_yaml(path, key)
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ToolError(f"{key}={path}: the file must hold a list `tools`, each with class_name, config, tool_schema")
    return entries


def _read(entry: Any, where: str) -> tuple[dict[str, Any], str, str]:
    """The entry, where it stands, and its kind: native or mcp."""
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ToolError(f"{where} has no class_name")
    name, settings = entry["class_name"], entry.get("config") or {}
    if not isinstance(settings, dict):
        raise ToolError(f"{where} ({name}): config must be a mapping, not {settings!r:.100}")
    kind = settings.get("type", "mcp" if name == "mcp" else "native")
    if kind not in ("mcp", "native"):
        raise ToolError(f"{where} ({name}): config.type={kind!r}: must be native or mcp")
    return entry, where, kind


def _source(entry: Any, where: str) -> ToolSource:
    entry, where, kind = _read(entry, where)
    if kind == "mcp":
        with _blamed(f"{where} ({entry['class_name']})"):
            return McpTools(entry)
    tool = _object(entry, where)
    with _blamed(f"{where} ({entry['class_name']})"):
        return NativeTool(tool) if getattr(tool, "stateful", True) else StatelessTool(tool)


def _object(entry: dict[str, Any], where: str) -> Any:
    name: str = entry["class_name"]
    make = load_dotted(_SHIPPED.get(name, name), f"{where}.class_name")
    with _blamed(f"{where} ({name})"):
        schema = entry.get("tool_schema")
        if schema is not None:
            schema = importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema.model_validate(schema)
        return make(config=entry.get("config") or {}, tool_schema=schema)


def _function_tools(path: str, key: str) -> list[ToolSource]:
    registry = importlib.import_module("verl.tools.function_tool").FUNCTION_TOOL_REGISTRY
    load_module(path, key)
    if not registry:
        raise ToolError(f"{key}={path}: no function of the file is decorated with @function_tool")
    with _blamed(f"{key}={path}"):
        return [FunctionTool(tool.name, tool.fn, tool.tool_schema) for tool in registry.values()]


@contextmanager
def _blamed(where: str) -> Iterator[None]:
    """Turn whatever users' code raises into a ToolError, with the lines of theirs that led there."""
    try:
        yield
    except (Exception, SystemExit) as error:
        theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if _PACKAGE not in frame.filename]
        lines = "".join(traceback.format_list(theirs[-_TRACEBACK_LINES:])).rstrip()
        if str(error).startswith(where):  # of ours, and says where itself
            raise ToolError(str(error)) from error
        raise ToolError(f"{where} failed: {type(error).__name__}: {error}{lines and chr(10)}{lines}") from error
