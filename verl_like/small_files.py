"""Small files that a run left, read with care: they may be damaged, or be somebody else's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # of a small file: a list of a million checksums has fewer
Form = Mapping[str, type | tuple[type, ...]]  # the entries that an object must have, and their types


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a small file. ValueError, naming it, for one that is larger or no UTF-8."""
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    return _text(data, str(path), most_bytes)


def read_object(path: Path, form: Form | None = None) -> dict[str, Any]:
    """Return the JSON object in a small file, with the entries of `form`. ValueError, naming it, for anything else."""
    return parse_object(read_text(path), str(path), form)


def parse_object(data: bytes | str, name: str, form: Form | None = None) -> dict[str, Any]:
    """Return the JSON object in `data`, what the file `name` holds; see `read_object`."""
    try:
        found = json.loads(_text(data, name) if isinstance(data, bytes) else data)
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


def _text(data: bytes, name: str, most_bytes: int = MOST_BYTES) -> str:
    if len(data) > most_bytes:
        raise ValueError(f"{name} is damaged: it has more than {most_bytes:,} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is damaged: {error}") from error
