"""OpenAI function schemas: made from a signature and a Google-style docstring; arguments checked against one.

The form is that of `transformers.utils.get_json_schema`, which chat templates are written for and which verl and TRL
use; that one imports torch, which has no place in a tool worker. Standard library only.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union

Settings = TypeVar("Settings")
_NAMED = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    tuple: "array",
    dict: "object",
}
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):\s*")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def texts_schema(name: str, description: str, **arguments: str) -> dict[str, Any]:
    """The schema of a tool whose arguments are texts that a call must have. arguments: what each is, by its name."""
    properties = {argument: {"type": "string", "description": what} for argument, what in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def settings_of(kind: type[Settings], config: Mapping[str, Any], tool: str) -> Settings:
    """The dataclass of a tool's config, without the config's `type`.

    Raises ValueError for keys that it does not have.
    """
    try:
        return kind(**{key: value for key, value in config.items() if key != "type"})
    except TypeError as error:
        known = ", ".join(each.name for each in dataclasses.fields(kind))  # pyright: ignore[reportArgumentType]
        raise ValueError(f"{tool}: config: {error}; it takes {known}") from error


def schema_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The schema of a function or a bound method. Raises ValueError, which says what its definition lacks."""
    doc = inspect.getdoc(function) or ""
    summary, described = _read_docstring(doc)
    if not summary:
        raise ValueError(f"tool {name!r} has no docstring: the model knows of a tool what its docstring says")
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for argument, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"tool {name!r}: argument {parameter} has no name that a call could use; write out each")
        if argument not in hints:
            raise ValueError(f"tool {name!r}: argument {argument!r} has no type hint")
        properties[argument] = _of_type(hints[argument], f"tool {name!r}: argument {argument!r}")
        _describe(properties[argument], described.get(argument, ""))
        if parameter.default is parameter.empty:
            required.append(argument)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}


def _describe(schema: dict[str, Any], text: str) -> None:
    """Add a description; `(choices: [...])` at its end are the values that the argument may have."""
    if choices := _CHOICES.search(text):
        schema["enum"] = json.loads(choices[1])
        text = text[: choices.start()].strip()
    if text:
        schema["description"] = text


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into the text before the first section, and the text of each argument."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, indent, current = "", 0, ""
    for line in doc.split("\n"):
        if heading := _SECTION.fullmatch(line):
            section, indent = heading[1], 0
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            if depth <= indent and (argument := _ARGUMENT.fullmatch(line.strip())):
                current = argument[1]
                described[current] = argument[2]
            elif current:
                described[current] = f"{described[current]} {line.strip()}".strip()
    return "\n".join(summary).strip(), described


def _of_type(hint: Any, what: str) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        if hint is Any:
            return {}
        if hint not in _NAMED:
            raise ValueError(f"{what} has the type {hint!r}, which JSON has no form for")
        return {"type": _NAMED[hint]}
    if origin is typing.Annotated:
        return _of_type(inner[0], what)
    if origin in (Union, types.UnionType):
        return _of_union([_of_type(part, what) for part in inner if part is not type(None)], type(None) in inner)
    if origin is Literal:
        kinds = list(dict.fromkeys(_NAMED[type(value)] for value in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _of_type(inner[0], what)}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_of_type(part, what) for part in inner]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_type(inner[1], what)}
    raise ValueError(f"{what} has the type {hint!r}, which JSON has no form for")


def _of_union(parts: list[dict[str, Any]], nullable: bool) -> dict[str, Any]:
    if len(parts) == 1:
        schema = dict(parts[0])
    elif all(part.keys() == {"type"} for part in parts):
        kinds = sorted({part["type"] for part in parts})
        schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        schema = {"anyOf": parts}
    return schema | ({"nullable": True} if nullable else {})


def plain_schema(schema: Any) -> dict[str, Any]:
    """A schema as a dict of Python's own types: verl's model of it, or a dict already. ValueError without a name."""
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_unset=True, exclude_none=True)
    if not isinstance(schema, Mapping) or not isinstance(schema.get("function"), Mapping):
        raise ValueError(f'a tool\'s schema is {{"type": "function", "function": {{...}}}}, not {schema!r:.200}')
    plain = json.loads(json.dumps(schema))
    if not isinstance(plain["function"].get("name"), str):
        raise ValueError(f"a tool's schema must name it: {schema!r:.200}")
    return plain


def bad_arguments(schema: dict[str, Any], arguments: Any) -> str:
    """Explain to the model why a tool cannot be called with these arguments; "" if it can. Types are not checked."""
    name = schema["function"]["name"]
    if not isinstance(arguments, dict):
        return f"Invalid arguments for '{name}': they must be a JSON object"
    parameters = schema["function"].get("parameters") or {}
    known = parameters.get("properties") or {}
    missing = [argument for argument in parameters.get("required") or [] if argument not in arguments]
    unknown = [] if parameters.get("additionalProperties") else [a for a in arguments if a not in known]
    problems = [f"missing {', '.join(missing)}"] if missing else []
    problems += [f"unknown {', '.join(str(a)[:100] for a in unknown[:10])}"] if unknown else []
    if not problems:
        return ""
    return f"Invalid arguments for '{name}': {'; '.join(problems)}. It takes: {', '.join(known) or 'none'}"


def typed(schema: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments given as text where the schema wants another type: as what their JSON says, if that is of the type. All
    arguments of an XML call are text, and models quote numbers in the other syntaxes too."""
    declared = (schema["function"].get("parameters") or {}).get("properties") or {}
    return {name: _as_declared(value, (declared.get(name) or {}).get("type")) for name, value in arguments.items()}


def _as_declared(value: Any, wanted: Any) -> Any:
    if not isinstance(value, str) or not isinstance(wanted, str) or wanted not in _TYPES:
        return value
    try:
        found = json.loads(value.lower() if wanted == "boolean" else value)
    except (ValueError, RecursionError):  # the tool will say what is wrong with it
        return value
    return found if isinstance(found, _TYPES[wanted]) and isinstance(found, bool) == (wanted == "boolean") else value
