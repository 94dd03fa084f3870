"""One live run per folder: `run.lock` says which run writes there, and its time of change that the run is alive.

    start --- no file, or its process is gone --------------------------> write it, touch it every 5 s, remove it
          --- a live process of this machine ---------------------------> RunLocked
          --- another machine (or container): look for 30 s --- touched --> RunLocked
                                                            --- not ----> that run is dead: take over

A process is told by its id and its start time, so that a number used again is not taken for the run; a machine by host
name and process namespace, because containers of one host count their processes from 1. No clocks are compared.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_like.checkpoint.files import write_atomically
from verl_like.config.errors import RunStopped
from verl_like.small_files import read_object

log = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
BEAT_S = 5.0
WATCH_S = 30.0

Holder = dict[str, Any]  # as below; started: of the process, since: for people
_HOLDER = {"host": str, "machine": str, "pid": int, "started": (str, type(None)), "run_id": str, "since": str}


class RunLocked(RunStopped):
    """Error of a folder into which another live run writes."""


class RunLock:
    """The folder of a run, held from `acquire` to `release`."""

    def __init__(self, root: str | Path, run_id: str) -> None:
        self.path = Path(root).expanduser() / LOCK_FILE
        pid = os.getpid()
        self.own: Holder = {
            "host": socket.gethostname(),
            "machine": machine(),
            "pid": pid,
            "started": process_start(pid),
            "run_id": run_id,
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="run lock", daemon=True)

    def acquire(self) -> None:
        """Take the folder. Raises RunLocked, naming host, process and run, while another live run holds it."""
        with _alone(self.path.parent):
            holder = _read(self.path)
            if holder is not None:
                if self._is_alive(holder):
                    raise RunLocked(
                        f"trainer.default_local_dir={str(self.path.parent)!r} belongs to a live run ({_name(holder)}). "
                        "Set another trainer.default_local_dir (or trainer.experiment_name), or end that run first"
                    )
                log.warning("the run that held %s is gone (%s): taken over", self.path.parent, _name(holder))
            self._write()
        self._heart.start()

    def confirm(self) -> None:
        """RunLocked if another run took the folder meanwhile; a lock that was deleted is written again."""
        holder = _read(self.path)
        if holder is None:
            log.warning("%s was removed while this run held it: it is written again", self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write()
        elif holder != self.own:
            raise RunLocked(
                f"another run took over trainer.default_local_dir={str(self.path.parent)!r} ({_name(holder)}), because "
                "this one did not answer for a while: nothing more is written there"
            )

    def release(self) -> None:
        """Give the folder back, if it is still this run's. May be called twice."""
        self._ended.set()
        if _read(self.path) == self.own:
            self.path.unlink()

    def _is_alive(self, holder: Holder) -> bool:
        if holder["machine"] == self.own["machine"]:
            return holder["started"] is not None and process_start(holder["pid"]) == holder["started"]
        log.warning(
            "%s is held by another machine's run (%s): waiting up to %.0f s for a sign of life",
            *(self.path.parent, _name(holder), WATCH_S),
        )
        before, end = _touched(self.path), time.monotonic() + WATCH_S
        while time.monotonic() < end:
            time.sleep(min(1.0, WATCH_S))
            if _touched(self.path) != before:
                return True
        return False

    def _write(self) -> None:
        write_atomically(self.path, json.dumps(self.own))

    def _beat(self) -> None:
        """Touch the file until the end; a run that took it over, or a folder that is gone, shows in `confirm`."""
        while not self._ended.wait(BEAT_S):
            try:
                if _read(self.path) == self.own:
                    os.utime(self.path)
            except (OSError, RunLocked) as error:
                log.warning("no sign of life could be left in %s: %s", self.path, error)


@contextmanager
def held(root: str | Path, run_id: str) -> Iterator[RunLock]:
    """The lock of a run's folder, held inside."""
    lock = RunLock(root, run_id)
    lock.acquire()
    try:
        yield lock
    finally:
        lock.release()


def machine() -> str:
    """Name the scope in which a process id is unique: host name and process namespace."""
    space = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(space) if space.is_symlink() else ''}".strip()


def process_start(pid: int) -> str | None:
    """Return a mark of this very process: when it started (Linux), else that it lives.

    None: it does not live, or is a zombie.
    """
    if not Path("/proc/self/stat").exists():
        return "alive" if _answers(pid) else None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]  # clock ticks since the machine started


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let two runs that start at once look and write one after the other (where the file system has locks)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        log.warning("%s: this file system has no locks (%s)", folder, error)
    try:
        yield
    finally:
        os.close(handle)


def _read(path: Path) -> Holder | None:
    """Read the holder of the folder; None where there is none. Raises RunLocked where the file is damaged."""
    try:
        return read_object(path, _HOLDER)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunLocked(f"{error}; delete it if no run writes into {path.parent}") from error


def _touched(path: Path) -> int | None:
    """The file's time of change, asked of the server also on a network file system."""
    try:
        with path.open() as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _name(holder: Holder) -> str:
    return f"host {holder['host']}, process {holder['pid']}, run {holder['run_id']}, since {holder['since']}"
