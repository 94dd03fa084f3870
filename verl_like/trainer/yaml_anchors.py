"""Extra content of a user's YAML and command line: helper sections, and keys for classes of the user's own."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from verl_like.config.schema import find_key, sections
from verl_like.config.spellings import Change, canonical

_PREFIXES = ("_", "x-", "x_")
_REFERENCE = re.compile(r"\$\{([\w-]+(?:\.[\w-]+)*)\}")
_OWN_CLASSES = ("data.custom_cls.path", "data.sampler.class_path")


def is_helper(name: str, value: Any, text: str) -> bool:
    """Check whether a top-level section of a YAML `text` holds values for other places, and no settings.

    By its name (_common, x-common), or because `${name...}` occurs in the text and nothing in it is a key of ours, by
    whatever spelling.
    """
    if name.startswith(_PREFIXES):
        return True
    if name in sections() or re.search(rf"\$\{{{re.escape(name)}[.}}]", text) is None:
        return False
    return not any(find_key(change.key) for change in canonical(_flat(name, value))[0])


def _flat(key: str, value: Any) -> list[Change]:
    if not isinstance(value, dict):
        return [Change(key, value)]
    return [change for name, item in value.items() for change in _flat(f"{key}.{name}", item)]


def inline(value: Any, helpers: dict[str, Any]) -> Any:
    """Replace every `${helper.name}` in a value by what stands there, whatever its type; others stay."""
    if isinstance(value, dict):
        return {name: inline(item, helpers) for name, item in value.items()}
    if isinstance(value, list):
        return [inline(item, helpers) for item in value]
    if not isinstance(value, str) or not helpers:
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole and whole[1].split(".")[0] in helpers:
        return inline(_found(whole[1], helpers), helpers)

    def text_of(match: re.Match[str]) -> str:
        return str(inline(_found(match[1], helpers), helpers)) if match[1].split(".")[0] in helpers else match[0]

    return _REFERENCE.sub(text_of, value)


def _found(path: str, helpers: dict[str, Any]) -> Any:
    value: Any = helpers
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise KeyError(path)
        value = value[name]
    return value


def inline_all(changes: Sequence[Change], helpers: dict[str, Any]) -> tuple[list[Change], list[str]]:
    """Put the helper sections' values into the changes; return the changes, and what is wrong with references."""
    found, problems = [], []
    for change in changes:
        try:
            found.append(replace(change, value=inline(change.value, helpers)))
        except KeyError as error:
            problems.append(f"{change.key}={change.value!r}: no helper section holds {error.args[0]}")
        except RecursionError:
            problems.append(f"{change.key}={change.value!r}: the helper sections refer to each other in a circle")
    return found, problems


def own_data_keys(changes: Sequence[Change], added: Collection[str]) -> list[Change]:
    """Turn `+data.name=value` that is no key of ours into data.extra.name, where a class of the user's may read it."""
    if not any(change.key in _OWN_CLASSES and change.value is not None for change in changes):
        return list(changes)
    return [
        Change(f"data.extra.{change.key.removeprefix('data.')}", change.value)
        if change.key in added and change.key.startswith("data.") and find_key(change.key) is None
        else change
        for change in changes
    ]
