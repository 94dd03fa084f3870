"""Checksums of a checkpoint's files: made where a file was written, collected in one list, compared before a resume.

Each rank notes what it wrote in `.checksums_<writer>.json` beside the files. The driver collects these notes, adds the
files that nobody noted, and writes `checksums.json` into the checkpoint's folder. CRC-32 finds any single flipped bit.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verl_like.checkpoint.files import write_atomically
from verl_like.small_files import read_object

log = logging.getLogger(__name__)

CHECKSUMS_FILE = "checksums.json"
_NOTES = ".checksums_*.json"
_BLOCK = 4 << 20  # bytes read at a time
_THREADS = 8  # zlib works without the interpreter's lock

_SUM = {"bytes", "crc32"}
Sum = dict[str, Any]  # {"bytes": size, "crc32": eight hexadecimal digits}


def checksum(path: Path) -> Sum:
    """Size and CRC-32 of a file."""
    crc = size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return {"bytes": size, "crc32": f"{crc:08x}"}


def note(folder: Path, files: Iterable[Path], writer: int) -> None:
    """Leave the checksums of these files, just written into `folder` by rank `writer`, for `collect`."""
    sums = {path.name: checksum(path) for path in sorted(files)}
    (folder / f".checksums_{writer}.json").write_text(json.dumps(sums))


def collect(checkpoint: Path) -> None:
    """Write the list of a checkpoint whose other files are all there; the ranks' notes go."""
    sums: dict[str, Sum] = {}
    notes = sorted(checkpoint.rglob(_NOTES))
    for path in notes:
        folder = path.parent.relative_to(checkpoint)
        sums |= {(folder / name).as_posix(): value for name, value in read_object(path).items()}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and path not in notes and name not in {*sums, CHECKSUMS_FILE}:
            sums[name] = checksum(path)
    write_atomically(checkpoint / CHECKSUMS_FILE, json.dumps(sums, indent=1, sort_keys=True))
    for path in notes:
        path.unlink()


def find_faults(checkpoint: Path, folders: Sequence[str], *, top: bool = True) -> list[str]:
    """List the faults of the files in these folders of a checkpoint ("actor/model"), and of those on top of it.

    A checkpoint of a version without checksums passes, with a warning.

    top: check the checkpoint's own files too.
    """
    try:
        sums: dict[str, Sum] = read_object(checkpoint / CHECKSUMS_FILE)
    except FileNotFoundError:
        log.warning("%s was written without checksums: its files are not checked", checkpoint)
        return []
    except ValueError as error:
        return [str(error)]
    if wrong := [name for name, value in sums.items() if not (isinstance(value, dict) and value.keys() == _SUM)]:
        return [f"{checkpoint / CHECKSUMS_FILE} is damaged: {wrong[0]!r:.80} has no size and checksum"]
    wanted = {
        name: value for name, value in sums.items() if name.rpartition("/")[0] in folders or (top and "/" not in name)
    }
    faults = [fault for name, value in wanted.items() if (fault := _wrong_size(checkpoint / name, value))]
    if faults:  # no need to read the others
        return faults
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda name: _wrong_sum(checkpoint / name, wanted[name]), wanted)
        return [fault for fault in found if fault]


def _wrong_size(path: Path, expected: Sum) -> str | None:
    try:
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
    except OSError as error:  # a name that no file can have, a folder that is not ours
        return f"{path} cannot be read: {error.strerror}"
    if size != expected["bytes"]:
        return f"{path} has {size} bytes, {expected['bytes']} when it was written"
    return None


def _wrong_sum(path: Path, expected: Sum) -> str | None:
    try:
        now = checksum(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    told = f"{path} is damaged (CRC-32 {now['crc32']}, {expected['crc32']} when it was written)"
    return None if now == expected else told
