"""Images and videos of a row: their places in the text, and handles, by which models/images.py finds the pixels.

A handle travels instead of the pixels: a batch of images would otherwise be copied between processes several times.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_like.batch import MediaHandle
from verl_like.config import DataConfig
from verl_like.data.rows import AnyRows, read_rows

_TAGS = re.compile(r"(<image>|<video>)")

DEFAULT_MEDIA_KEYS = {"image": DataConfig().image_key, "video": DataConfig().video_key}


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaColumn:
    """One image or video column of a file: how many things each row has."""

    kind: str  # "image" or "video"
    column: str
    counts: list[int]


def media_columns(path: Path, rows: AnyRows, columns: dict[str, str]) -> list[MediaColumn]:
    """The columns ({kind: name}) of a file that hold anything."""
    found = []
    for kind, column in columns.items():
        if column in rows.columns:
            counts = read_rows(path, {column}).counts(column)
            if any(counts):
                found.append(MediaColumn(kind=kind, column=column, counts=counts))
    return found


def handles(path: Path, columns: list[MediaColumn], row: dict[str, Any], number: int) -> list[MediaHandle]:
    """Handles of one row's images and videos, each kind in order; `number` is its place in the file. Cells of a parquet
    file stay there; what a text file holds (a path, a URL) is in the handle."""
    stored = path.suffix == ".parquet"
    return [
        MediaHandle(
            kind=column.kind,
            path=str(path),
            column=column.column,
            row=number,
            number=i,
            source="" if stored else cell[i] if isinstance(cell := row[column.column], list) else cell,
        )
        for column in columns
        for i in range(column.counts[number])
    ]


def insert_media(
    messages: list[dict[str, Any]], media: list[MediaHandle], columns: dict[str, str], place: str
) -> list[dict[str, Any]]:
    """Turn <image> and <video> tags of messages into content parts ({"type": "image"}), as chat templates want them.

    Raises ValueError unless there are as many tags as images and videos.

    columns: {kind: column} of the kinds that have one; the tags of another kind are plain text.
    """
    tags = [f"<{kind}>" for kind in columns]
    split = [{**m, "content": _parts(m["content"], tags)} if _has_tag(m, tags) else m for m in messages]
    for kind, column in columns.items():
        parts = [part for m in split if isinstance(m.get("content"), list) for part in m["content"]]
        count = sum(part.get("type") == kind for part in parts)
        given = sum(handle.kind == kind for handle in media)
        if count != given:
            raise ValueError(
                f"{place}: the prompt has {count} <{kind}> tags, but the row has {given} {kind}s "
                f"(data.{kind}_key={column})"
            )
    return split


def refuse_tags(messages: list[dict[str, Any]], missing: dict[str, str], place: str) -> None:
    """Raise ValueError for a tag whose kind has a column ({kind: name}) that the file does not have."""
    for kind, column in missing.items():
        if any(_has_tag(message, [f"<{kind}>"]) for message in messages):
            raise ValueError(
                f"{place}: the prompt has <{kind}>, but the file has no column {column!r} (data.{kind}_key): set it to "
                f"the column with the {kind}s, or to null where <{kind}> is plain text"
            )


def _has_tag(message: dict[str, Any], tags: list[str]) -> bool:
    content = message.get("content")
    return isinstance(content, str) and any(tag in content for tag in tags)


def _parts(text: str, tags: list[str]) -> list[dict[str, str]]:
    pieces = [piece for piece in _TAGS.split(text) if piece]
    return [{"type": piece[1:-1]} if piece in tags else {"type": "text", "text": piece} for piece in pieces]
