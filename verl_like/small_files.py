"""Small files that a run left, read with care: they may be damaged, or be somebody else's."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 64 << 20  # of a small file: a list of a million checksums has fewer
Form = Mapping[str, type | tuple[type, ...]]  # the entries that an object must have, and their types


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return what a file holds.

    Raises ValueError, naming it, for one that is larger, that is none (a folder, a pipe, which nobody may ever write
    to), or that cannot be read. Raises FileNotFoundError where nothing is there.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{path} is damaged: it is no file")
            data = file.read(min(os.fstat(file.fileno()).st_size, most_bytes) + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > most_bytes:
        raise ValueError(f"{path} is damaged: it has more than {most_bytes:,} bytes")
    return data


def opened_tensors(path: Path) -> Any:
    """Open a safetensors file, as a context. Raises ValueError, naming it, where it is damaged or no file."""
    from safetensors import SafetensorError, safe_open  # here: who reads a run's folder needs no tensors

    try:
        if not path.is_file():
            raise OSError("it is no file")
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a small file. Raises ValueError, naming it, as `read_bytes`, and for one that is no UTF-8."""
    return _text(read_bytes(path, most_bytes), str(path))


def read_yaml(path: Path) -> str:
    """Return the text of a small YAML file.

    Raises ValueError, naming it, for one that refers to its own parts: a few lines of such can stand for a million
    million. What a run writes does not.
    """
    text = read_text(path)
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=_Yaml)):
            raise ValueError(f"{path} is damaged: it has aliases (*name)")
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    return text


def read_object(path: Path, form: Form | None = None, *, strict: bool = False) -> dict[str, Any]:
    """Return the JSON object in a small file, with the entries of `form`.

    Raises ValueError, naming it, for anything else.

    strict: also for numbers that are not finite, and for an entry that stands twice.
    """
    return parse_object(read_text(path), str(path), form, strict=strict)


def parse_object(data: bytes | str, name: str, form: Form | None = None, *, strict: bool = False) -> dict[str, Any]:
    """Return the JSON object in `data`, what the file `name` holds; see `read_object`."""
    text = _text(data, name) if isinstance(data, bytes) else data
    try:
        found = json.loads(text, **(_STRICT if strict else {}))
    except RecursionError as error:
        raise ValueError(f"{name} is damaged: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} is damaged: it holds {type(found).__name__} where an object is expected")
    for key, kinds in (form or {}).items():
        if key not in found or not isinstance(found[key], kinds) or (isinstance(found[key], bool) and kinds is int):
            raise ValueError(f"{name} is damaged: {key}={found.get(key, 'missing')!r:.60}")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.20} is no number")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"an entry stands twice among {', '.join(name for name, _ in pairs):.100}")
    return found


_STRICT: dict[str, Any] = {"parse_constant": _finite, "parse_float": _finite, "object_pairs_hook": _once}
_Yaml = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is damaged: {error}") from error
