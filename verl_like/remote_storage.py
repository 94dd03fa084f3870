"""Folders on remote storage (hdfs, s3, gs through pyarrow, all else through fsspec): checkpoints go there and come
back, models come from there.

A folder is whole when its marker is there, which is written last and holds the size of each file: an upload that was
cut leaves files, but no marker, and the next one writes over them. Sizes are compared after each copy, both ways; the
CRC-32 of a checkpoint's files is compared when it is loaded (checkpoint/checksums.py).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import math
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from pyarrow import fs as arrow_fs

from verl_like.small_files import parse_object
from verl_like.text import one_line

log = logging.getLogger(__name__)

MARKER = "verl_like_upload.json"  # {"files": {name: bytes}, "run": whose}
SHM = Path("/dev/shm/verl_like_models")
CACHE = Path("~/.cache/verl_like/models")
_ARROW = ("hdfs", "viewfs", "s3", "gs")
_STEP = re.compile(r"global_step_(0|[1-9][0-9]{0,17})")
_TRIES, _PAUSE_S = 3, 2.0
_FILE_S, _SLOWEST = (
    60.0,
    20e6,
)  # storage that takes longer for a file than so long, and at so many bytes a second, is away
_LAST_S = 300.0  # further patience at the end of a run
_LOOK_S = 1.0


def is_remote(name: str | None) -> bool:
    """True where the name has a scheme. file:// counts: it is opened like all others."""
    return name is not None and "://" in name


class RemoteFolder:
    """A folder at a URL. Raises ValueError, naming `key`, where the storage cannot be reached."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url.rstrip("/"), key
        with self._told("cannot be opened"):
            self._fs, self._root = _open(self.url)
        self._due, self._moves = math.inf, True  # since the last file that came through

    @property
    def overdue_s(self) -> float:
        """Seconds by which the next file is late, in however many tries; negative while it has time."""
        return time.monotonic() - self._due

    def upload(self, folder: Path, run: str = "", *, over_others: bool = True) -> None:
        """Copy a local folder to one of the same name, its marker last: not where files were deleted meanwhile, and
        over a whole one that names another run only where `over_others` says so."""
        sizes = _sizes(folder)
        target = f"{self._root}/{folder.name}"
        with self._told(f"{folder.name} cannot be written"), self._timed(next(iter(sizes.values()), 0)):
            if not sizes:
                raise FileNotFoundError(f"{folder} holds no file")
            if self._fs.exists(f"{target}/{MARKER}"):  # of an older checkpoint of this step
                other = self._marker(folder.name).get("run", "")
                if not over_others and other not in ("", run):
                    raise FileExistsError(f"it is there already, of another run ({other}): give each run its folder")
                self._fs.rm_file(f"{target}/{MARKER}")
            for name, size in sizes.items():
                self._expect(size)
                self._fs.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(folder / name), f"{target}/{name}")
                self._check(f"{target}/{name}", size)
                self._moves = True
            if _sizes(folder) != sizes:
                raise OSError(f"the files of {folder} changed during the upload")
            with self._fs.open(f"{target}/{MARKER}", "wb") as file:
                file.write(json.dumps({"files": sizes, "run": run}).encode())

    def steps(self) -> list[int]:
        """Steps whose whole checkpoints are here, the oldest first."""
        with self._told("cannot be listed"):
            if not self._fs.exists(self._root):
                return []
            names = [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
            found = [int(match[1]) for name in names if (match := _STEP.fullmatch(name))]
            return sorted(n for n in found if self._fs.exists(f"{self._root}/global_step_{n}/{MARKER}"))

    def holds(self, name: str, run: str) -> bool:
        """True where the storage has the folder, whole, and of this run (or of an older version, which named none)."""
        return self.read(f"{name}/{MARKER}") is not None and self._marker(name).get("run", "") in ("", run)

    def read(self, name: str) -> bytes | None:
        """A small file; None where it is not there."""
        with self._told(f"{name} cannot be read"):
            return self._fs.cat_file(f"{self._root}/{name}") if self._fs.exists(f"{self._root}/{name}") else None

    def download(self, name: str, target: Path) -> Path:
        """A whole folder of `upload`, at `target` once all of it is there."""
        with self._told(f"{name} cannot be read"):
            if not self._fs.exists(f"{self._root}/{name}/{MARKER}"):
                raise FileNotFoundError(f"it has no {MARKER}: it was not uploaded to its end")
            return self._fetch(f"{self._root}/{name}", self._marker(name)["files"], target)

    def _marker(self, name: str) -> dict[str, Any]:
        """Read the marker of a folder that was uploaded to its end: the sizes of its files, and its run.

        Raises ValueError, which names the marker, where it is damaged.
        """
        file = f"{name}/{MARKER}"
        found = parse_object(
            self._fs.cat_file(f"{self._root}/{file}"), f"{self.key}={self.url}/{file}", {"files": dict}
        )
        if not all(isinstance(size, int) and not _leads_out(path) for path, size in found["files"].items()):
            raise ValueError(f"{self.key}={self.url}/{file} is damaged: files={found['files']!r:.100}")
        return found

    def fetch(self, cache: Path) -> Path:
        """Copy the folder as it is now to a cache, once for all processes of a machine."""
        with self._told("cannot be read"):
            infos: dict[str, Any] = self._fs.find(self._root, detail=True)
            if not infos:
                raise FileNotFoundError("there is no file in it")
            sizes = {path[len(self._root) :].lstrip("/"): int(info["size"]) for path, info in sorted(infos.items())}
            versions = [str(info.get("ETag") or info.get("mtime")) for _, info in sorted(infos.items())]
            digest = hashlib.blake2b(json.dumps([self.url, sizes, versions]).encode(), digest_size=8).hexdigest()
            target = cache.expanduser() / digest / self.url.rpartition("/")[2]
            with one_at_a_time(target):
                if not target.is_dir():
                    log.info("%s: fetching %s (%.1f MB) to %s", self.key, self.url, sum(sizes.values()) / 1e6, target)
                    self._fetch(self._root, sizes, target)
            return target

    def _fetch(self, source: str, sizes: dict[str, int], target: Path) -> Path:
        part = target.with_name(target.name + ".fetching")
        shutil.rmtree(part, ignore_errors=True)
        for name, size in sizes.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(f"{source}/{name}", str(part / name))
            if (part / name).stat().st_size != size:
                raise OSError(f"{name} has {(part / name).stat().st_size} of {size} bytes")
        part.rename(target)
        return target

    def _check(self, path: str, size: int) -> None:
        there = int(self._fs.info(path)["size"])
        if there != size:
            raise OSError(f"{path} has {there} bytes after the upload, {size} here")

    @contextmanager
    def _timed(self, size: int) -> Iterator[None]:
        self._expect(size)
        yield
        self.rest()

    def rest(self) -> None:
        """Stop the clock of `overdue_s` while no transfer is in flight: the next one has its full time."""
        self._due, self._moves = math.inf, True

    def _expect(self, size: int) -> None:
        if self._moves:
            self._due, self._moves = time.monotonic() + _FILE_S + size / _SLOWEST, False

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # fsspec's drivers raise errors of the clients that they use
            raise ValueError(f"{self.key}={self.url}: {what}: {one_line(error)}") from error


@functools.cache
def local_folder(path: str, key: str = "model.path") -> str:
    """Return the local folder of a model or tokenizer, or its name on the hub; a URL is fetched once a machine.

    The result is kept: a process looks at the storage once.
    """
    if not is_remote(path):
        return os.path.expanduser(path)
    return str(RemoteFolder(path, key).fetch(CACHE))


def _leads_out(name: str) -> bool:
    """True where a file's name leads out of its folder."""
    return name.startswith("/") or ".." in name.split("/")


def _open(url: str) -> tuple[Any, str]:
    if url.partition("://")[0] in _ARROW:
        from fsspec.implementations.arrow import ArrowFSWrapper

        system, root = arrow_fs.FileSystem.from_uri(url)
        return ArrowFSWrapper(system), root.rstrip("/")
    system, root = fsspec.core.url_to_fs(url)
    return system, root.rstrip("/")


def _files(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sizes(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}


class Uploader:
    """Uploads checkpoints in the background, one after the other; what failed is tried again with the next one: once,
    until the storage is there again, so that a run does not wait for it the longer the more it has saved. Storage that
    does not answer holds nothing up after its time (RemoteFolder.overdue_s)."""

    def __init__(self, remote: RemoteFolder, run: str = "", *, over_others: bool = True) -> None:
        """Begin without any upload. For run and over_others see RemoteFolder.upload."""
        self.remote, self._run, self._over_others = remote, run, over_others
        self._tasks: queue.SimpleQueue[tuple[Path, Future[None]]] = queue.SimpleQueue()
        self._pending: dict[Path, Future[None]] = {}
        self._away = False  # the last upload failed
        # of its own: one from a pool would keep the process from ending, as long as the storage does not answer
        threading.Thread(target=self._work, name="upload", daemon=True).start()

    def start(self, checkpoint: Path) -> None:
        """Upload this folder too, once the ones before are done: a copy that lags does not pile up.

        Does nothing where the storage is away.
        """
        for path in (*self._failed(None if self._away else 0.0), checkpoint):
            self._submit(path)

    def finish(self) -> list[str]:
        """Wait, and list what could not be uploaded, after one more try."""
        for path in self._failed(_LAST_S):
            self._submit(path)
        return [str(path) for path in (*self._failed(_LAST_S), *self._pending)]

    @property
    def pending(self) -> list[Path]:
        """Folders that are not known to be whole on the storage: deleted here, they would be lost."""
        return list(self._pending)

    def _submit(self, path: Path) -> None:
        self._pending[path] = Future()
        self._tasks.put((path, self._pending[path]))

    def _failed(self, patience_s: float | None) -> list[Path]:
        """Wait until all have ended, or the storage is late by so much (None: not at all); those that failed and are
        still here."""
        while patience_s is not None and (busy := [each for each in self._pending.values() if not each.done()]):
            if self.remote.overdue_s > patience_s:
                log.warning(
                    "%s=%s does not answer: %s stay here until it does",
                    *(self.remote.key, self.remote.url, ", ".join(path.name for path in self._pending)),
                )
                break
            wait(busy, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        ended = {path: future for path, future in self._pending.items() if future.done()}
        for path in ended:
            del self._pending[path]
        return [path for path, future in ended.items() if future.exception() is not None and path.is_dir()]

    def _work(self) -> None:
        while True:
            path, future = self._tasks.get()
            try:
                self._upload(path)
            except Exception as error:
                if self._tasks.empty():
                    self.remote.rest()
                future.set_exception(error)
            else:
                future.set_result(None)

    def _upload(self, path: Path) -> None:
        tries = 1 if self._away else _TRIES
        for number in range(1, tries + 1):
            try:
                self.remote.upload(path, self._run, over_others=self._over_others)
            except ValueError as error:
                log.warning("upload of %s, try %d of %d: %s", path.name, number, tries, error)
                if number == tries:
                    self._away = True
                    raise
                time.sleep(_PAUSE_S * number)
            else:
                self._away = False
                log.info("uploaded %s to %s", path.name, self.remote.url)
                return


def to_shared_memory(folder: Path, key: str) -> Path:
    """A copy of a model's folder in /dev/shm, made once for all processes of a machine; the folder where it does not
    fit."""
    stamp = json.dumps([[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in _files(folder)])
    target = SHM / hashlib.blake2b(stamp.encode(), digest_size=8).hexdigest() / folder.name
    with one_at_a_time(target):
        if target.is_dir():
            return target
        size, free = sum(path.stat().st_size for path in _files(folder)), shutil.disk_usage(SHM.parent).free
        if size > free:
            log.warning("%s has no effect: %s has %.1f MB, %s %.1f MB free", key, folder, size / 1e6, SHM, free / 1e6)
            return folder
        part = target.with_name(target.name + ".copying")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(folder, part).rename(target)
        return target


@contextmanager
def one_at_a_time(target: Path) -> Iterator[None]:
    """Keep other processes of this machine from making `target` meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
