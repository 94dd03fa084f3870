"""Images of dataset rows, opened here, in whichever process needs the pixels, and nowhere else (videos: videos.py).

A handle (`batch.MediaHandle`) names a cell of a parquet file, a path or a URL. What a cell holds: {"bytes": ...}
(Hugging Face's form), bytes, a path, a URL of any scheme that fsspec knows, data:image/png;base64,..., or a dictionary
with one of them under "path", "image", "url" or "image_url". Relative paths begin at the data file's folder.
"""

from __future__ import annotations

import base64
import functools
import io
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import ExifTags, Image

from verl_like.batch import MediaHandle
from verl_like.remote_storage import is_remote

PLACES = ("bytes", "path", "image", "url", "image_url")  # of what is meant in a dictionary; the first that is set
_TURNS = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"]
_TURN = {number: Image.Transpose[name] for number, name in enumerate(_TURNS, start=2)}  # by EXIF's orientation
# What a file holds where its EXIF is worth a look: PIL turns a TIFF itself, and decodes all of a PNG to find some.
_MARKS = {"TIFF": (), "PNG": (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")}
_GROUPS = 4  # row groups kept in memory: rows of a batch are often neighbours


class MediaError(ValueError):
    """Error of an image or video that cannot be used: the message names the row and says what is wrong with it."""


def place_of(handle: MediaHandle) -> str:
    """Name the image or video, for messages."""
    return f"{handle.path}, row {handle.row}: {handle.kind} {handle.number} of column {handle.column!r}"


def header(handle: MediaHandle, max_megapixels: float) -> tuple[int, int]:
    """Read (width, height) as the image is shown, without decoding it.

    Raises MediaError: missing, no image, or larger than allowed.
    """
    image, data = _opened(handle, cell_of(handle))
    with image:
        size = bounded(handle, image.size, max_megapixels)  # before PIL decodes all of it, to find its EXIF
        marked = any(mark in data for mark in _MARKS.get(str(image.format), (b"",)))
        lies = marked and _turn(image) in [_TURN[number] for number in (5, 6, 7, 8)]
        return (size[1], size[0]) if lies else size


def bounded(handle: MediaHandle, size: tuple[int, int], max_megapixels: float) -> tuple[int, int]:
    """Return `size` (width, height). Raises MediaError where it is larger than allowed."""
    width, height = size
    if width * height > max_megapixels * 1e6:
        raise MediaError(
            f"{place_of(handle)} has {width} x {height} pixels, more than data.max_image_megapixels="
            f"{max_megapixels:g}: make it smaller, or raise the limit"
        )
    return width, height


def decoded(handle: MediaHandle, value: Any = None) -> Image.Image:
    """Decode the image as a viewer shows it. Raises MediaError where it is damaged.

    value: the part of the cell that holds or names the image; None: the whole cell.
    """
    image, _ = _opened(handle, cell_of(handle) if value is None else value)
    with image:
        try:
            image.load()
            return shown(image)
        except Exception as error:  # of any of PIL's decoders
            raise MediaError(f"{place_of(handle)} cannot be decoded: {error}") from error


def shown(image: Image.Image) -> Image.Image:
    """Convert the image to RGB: upright, white behind what is transparent, eight bits of all its depth."""
    if (turn := _turn(image)) is not None:
        image = image.transpose(turn)
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = _eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        ground = Image.new("RGB", image.size, "white")
        ground.paste(image, mask=image.getchannel("A"))
        return ground
    return image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert deeper grey to eight bits: integers have 16, fractions go up to 1 or to 255, unless one is larger."""
    grey = np.nan_to_num(np.asarray(image, dtype=np.float64), posinf=0.0, neginf=0.0)
    tops = (1.0, 255.0, 65535.0) if image.mode == "F" else (65535.0,)
    top = next((top for top in tops if grey.max() <= top), grey.max())
    grey[grey == image.info.get("transparency")] = top  # of a PNG: one value
    return Image.fromarray((grey.clip(0, top) * (255 / top)).round().astype(np.uint8))


def _turn(image: Image.Image) -> Image.Transpose | None:
    """Find the rotation that turns the image upright; None where it is, or its EXIF is of no known form."""
    try:
        return _TURN.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # EXIF of no known form: shown as it lies
        return None


def _opened(handle: MediaHandle, value: Any) -> tuple[Image.Image, bytes]:
    """Open the image, not decoded; return it and its file."""
    data = read(handle, value)
    try:
        return Image.open(io.BytesIO(data)), data
    except Exception as error:
        raise MediaError(f"{place_of(handle)} is no image that PIL can open ({len(data)} bytes): {error}") from error


def read(handle: MediaHandle, value: Any) -> bytes:
    """Read the file that `value` holds or names."""
    while isinstance(value, dict):
        value = next((value[key] for key in PLACES if value.get(key)), None)
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value:
        raise MediaError(
            f"{place_of(handle)} holds no {handle.kind}: expected bytes, a path, a URL, or a dictionary with one of "
            f"{', '.join(PLACES)}"
        )
    try:
        if value.startswith("data:"):
            return base64.b64decode(value.partition(",")[2], validate=True)
        if is_remote(value):
            with fsspec.open(value, "rb") as file:
                return file.read()  # pyright: ignore[reportAttributeAccessIssue]
        return local_path(handle, value).read_bytes()
    except Exception as error:  # of any file system
        raise MediaError(f"{place_of(handle)}: {value[:200]!r} cannot be read: {error}") from error


def local_path(handle: MediaHandle, value: str) -> Path:
    """Resolve a path in a cell, which may begin at the data file's folder."""
    return Path(handle.path).parent / Path(value).expanduser()


def cell_of(handle: MediaHandle) -> Any:
    """Read the cell that names the image or video. Raises MediaError where it cannot be read."""
    if handle.source:
        return handle.source
    try:
        row = handle.row
        for group, rows in enumerate(_group_sizes(handle.path)):
            if row < rows:
                value = _group(handle.path, group, handle.column)[row].as_py()
                return value[handle.number] if isinstance(value, list) else value
            row -= rows
    except (OSError, pa.ArrowException, IndexError) as error:
        raise MediaError(f"{place_of(handle)} cannot be read: {error}") from error
    raise MediaError(f"{place_of(handle)}: the file has fewer rows; was it changed during the run?")


@functools.lru_cache(maxsize=64)
def _group_sizes(path: str) -> tuple[int, ...]:
    metadata = pq.ParquetFile(path).metadata
    return tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))


@functools.lru_cache(maxsize=_GROUPS)
def _group(path: str, group: int, column: str) -> pa.ChunkedArray:
    return pq.ParquetFile(path).read_row_group(group, columns=[column]).column(0)
