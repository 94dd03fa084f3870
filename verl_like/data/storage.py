"""Resolver of the names in data.*_files to local files: remote ones are fetched once, to a cache or shared memory.

hdfs, s3, gs and the like are opened by pyarrow's own file systems where it has one, everything else by fsspec, so that
plain pyarrow is enough for S3 and an installed fsspec driver (gcsfs, adlfs ...) adds its scheme.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

import fsspec
from pyarrow import fs as arrow_fs

from verl_like.text import one_line

logger = logging.getLogger(__name__)

DEFAULT_CACHE = "~/.cache/verl_like/data"
SHM_ROOT = Path("/dev/shm")
_CHUNK = 1 << 22  # bytes
_ARROW_SCHEMES = ("hdfs", "viewfs", "s3", "gs", "gcs")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that can be fetched, and what tells one version of it from the next."""

    size: int  # bytes
    version: str
    open: Callable[[], IO[bytes]]


def localize(name: str, *, cache_dir: str | None, use_shm: bool, key: str) -> Path:
    """The local path of a data file. `key` is the configuration key, for messages.

    A remote file is fetched into `cache_dir` unless the same version (size, time or tag) already lies there. use_shm
    copies the file to /dev/shm, from where it is removed when this process ends.
    """
    path = _fetched(name, cache_dir or DEFAULT_CACHE, key) if is_remote(name) else _local(name)
    return to_shared_memory(path, key) if use_shm and path.is_file() else path


def is_remote(name: str) -> bool:
    """True where the name has a scheme other than file://."""
    return "://" in name and not name.startswith("file://")


def _local(name: str) -> Path:
    if name.startswith("file://"):
        name = unquote(urlsplit(name).path)
    return Path(name).expanduser().resolve()


def _fetched(url: str, cache_dir: str, key: str) -> Path:
    try:
        remote = _look_up(url)
        digest = hashlib.blake2b(f"{url}\n{remote.size}\n{remote.version}".encode(), digest_size=12).hexdigest()
        target = Path(cache_dir).expanduser().resolve() / digest / urlsplit(url).path.rstrip("/").rsplit("/", 1)[-1]
        if target.is_file() and target.stat().st_size == remote.size:
            logger.info("%s: %s is cached in %s", key, url, target)
            return target
        logger.info("%s: fetching %s (%.1f MB) to %s", key, url, remote.size / 1e6, target)
        with closing(remote.open()) as source:
            _write(source, target, remote.size)
    except Exception as error:  # fsspec's drivers raise errors of the clients that they use
        raise ValueError(f"{key}: {url} cannot be fetched: {one_line(error)}") from error
    return target


def _look_up(url: str) -> RemoteFile:
    """Size and version of a remote file. Raises FileNotFoundError if there is none."""
    if urlsplit(url).scheme in _ARROW_SCHEMES:
        return _look_up_arrow(url.replace("gcs://", "gs://", 1))
    system, path = fsspec.core.url_to_fs(url)
    info: dict[str, Any] = system.info(path)
    if info["type"] != "file":
        raise FileNotFoundError("it is a folder; name the file in it")
    version = next(
        (str(info[name]) for name in ("ETag", "etag", "mtime", "LastModified", "created") if name in info), ""
    )
    return RemoteFile(int(info["size"]), version, partial(system.open, path, "rb"))


def _look_up_arrow(url: str) -> RemoteFile:
    system, path = arrow_fs.FileSystem.from_uri(url)
    info = system.get_file_info(path)
    if not info.is_file:
        absent = info.type == arrow_fs.FileType.NotFound
        raise FileNotFoundError("there is no such file" if absent else "it is a folder; name the file in it")
    return RemoteFile(info.size, str(info.mtime_ns), partial(system.open_input_stream, path))


def _write(source: IO[bytes], target: Path, size: int) -> None:
    """Copy to `target`, which appears complete or not at all. Raises OSError if the source ends early."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    try:
        with os.fdopen(handle, "wb") as file:
            shutil.copyfileobj(source, file, _CHUNK)
        if os.path.getsize(temporary) != size:
            raise OSError(f"got {os.path.getsize(temporary)} of {size} bytes")
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def to_shared_memory(path: Path, key: str) -> Path:
    """A copy of the file in /dev/shm, removed when this process ends; the file itself where it does not fit."""
    size = path.stat().st_size
    free = shutil.disk_usage(SHM_ROOT).free if SHM_ROOT.is_dir() else 0
    if size > free:
        logger.warning(
            "%s: data.use_shm has no effect on %s: it has %.1f MB, and %s has %.1f MB free",
            *(key, path, size / 1e6, SHM_ROOT, free / 1e6),
        )
        return path
    folder = Path(tempfile.mkdtemp(prefix="verl_like_data_", dir=SHM_ROOT))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copy2(path, folder / path.name)
    return folder / path.name
