"""Heartbeat of this process: its current work, told to the watchdog (cluster/watchdog.py), which reads it from outside.

    with span("micro-batch", amount=4096):  # may take stall_timeout, and ten times what 4096 tokens took at worst
        ...

Spans nest, in each thread; begin and end of an inner one are progress of the outer one, as `advance` is. They lie in a
file that is mapped into memory, which can be read of a process that is stopped, or stuck in native code. Without
`publish` nothing is written.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DRIVER = "the driver"  # who waits for it is not late
FIRST = 3  # what happens for the first time (a compilation, a connection) may take so many stall_timeouts
MARGIN = 10  # times the slowest pace seen so far: a machine that others use too is slow, not stuck
_SIZE = 8192
_STACKS = "verl_like_stacks"
_WRITE_S = 0.05  # ends of spans at most so often; begins at once: nothing may run any more after them
EPISODE: ContextVar[str] = ContextVar("EPISODE", default="")  # that the code at hand works for: train-17-0
_LOOK_S = 2.0  # how often a thread writes down what was too quick, and the last collective of one that waits


@dataclass(slots=True)
class Span:
    """Current work of a thread.

    kind: the work with the work around it ("update/micro-batch"); time limits follow the speed of earlier work of its
        kind.
    since: monotonic time of the last progress.
    """

    what: str
    kind: str
    amount: float
    whom: str
    since: float
    allowed_s: float


class Beacon:
    """Publisher of the spans of this process, in the file `path`.

    stall_timeout: [s] see the module; None: no thread is ever late.
    last_collective: function that gives, for each process group, the last collective that was begun here.
    """

    def __init__(
        self, path: Path, stall_timeout: float | None, last_collective: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self._stall_s, self._last_collective = stall_timeout, last_collective
        self._lock = threading.Lock()
        self._threads: dict[str, list[Span]] = {}
        self._slowest: dict[str, tuple[int, float]] = {}  # by kind: how many, [s] for one of its amount
        self._collective: dict[str, Any] = {}
        self._written, self._is_old = -math.inf, False
        with path.open("wb+") as file:
            file.truncate(_SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._write()
        threading.Thread(target=self._keep, name="progress", daemon=True).start()

    @contextmanager
    def span(self, what: str, amount: float, whom: str, expected_s: float = 0.0) -> Iterator[None]:
        """Publish that this thread does `what` until the block ends; see the function `span` for the arguments."""
        with self._lock:
            spans = self._threads.setdefault(threading.current_thread().name, [])
            if spans:
                self._progress(spans[-1])
            now, kind = time.monotonic(), "/".join([*(outer.what for outer in spans[-1:]), what])
            spans.append(Span(what, kind, amount, whom, now, self._allowed(kind, amount, whom, expected_s)))
            self._write()
        try:
            yield
        finally:
            with self._lock:
                self._progress(spans.pop())
                if spans:
                    spans[-1].since = time.monotonic()
                self._changed()

    def advance(self, amount: float) -> None:
        """Record that one part of this thread's work is done, and begin the next, of size `amount`."""
        with self._lock:
            for span in self._threads.get(threading.current_thread().name, [])[-1:]:
                span.amount = amount
                self._progress(span)
                span.allowed_s = self._allowed(span.kind, amount, span.whom)
                self._changed()

    def _progress(self, span: Span) -> None:
        now = time.monotonic()
        pace = (now - span.since) / max(span.amount, 1.0)
        count, slowest = self._slowest.get(span.kind, (0, 0.0))  # the first one, with its compilations, is forgotten
        self._slowest[span.kind] = (count + 1, pace if count == 1 else max(pace, slowest))
        span.since = now

    def _allowed(self, kind: str, amount: float, whom: str, expected_s: float = 0.0) -> float:
        if self._stall_s is None or whom == DRIVER:
            return math.inf
        count, pace = self._slowest.get(kind, (0, 0.0))
        return self._stall_s + MARGIN * pace * max(amount, 1.0) if count else self._stall_s * FIRST + expected_s

    def _changed(self) -> None:
        self._is_old = True
        if time.monotonic() - self._written >= _WRITE_S:
            self._write()

    def _write(self) -> None:
        spans = [
            {"thread": name, "in": [span.what for span in of_thread], **_plain(of_thread[-1])}
            for name, of_thread in list(self._threads.items())
            if of_thread
        ]
        data = json.dumps({"spans": spans, "collective": self._collective}).encode()
        if len(data) < _SIZE - 1:
            self._map[: len(data) + 1] = data + b"\0"
        self._written, self._is_old = time.monotonic(), False

    def _keep(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                since = min((spans[-1].since for spans in self._threads.values() if spans), default=math.inf)
            waits = time.monotonic() - since > _LOOK_S
            found = self._last_collective() if waits else self._collective
            with self._lock:
                if self._is_old or found != self._collective:
                    self._collective = found
                    self._write()


def _plain(span: Span) -> dict[str, Any]:
    allowed = span.allowed_s if math.isfinite(span.allowed_s) else None
    return {"amount": span.amount, "whom": span.whom, "since": span.since, "allowed_s": allowed}


_beacon: Beacon | None = None


def publish(path: Path, stall_timeout: float | None, last_collective: Callable[[], dict[str, Any]] = dict) -> None:
    """Begin to publish this process's spans in the file; see Beacon."""
    global _beacon
    _beacon = Beacon(path, stall_timeout, last_collective)


@contextmanager
def span(what: str, *, amount: float = 1.0, whom: str = "", expected_s: float = 0.0) -> Iterator[None]:
    """Publish that this thread does `what` until the block ends.

    amount: size of the work in a unit of its own (tokens, bytes): the time limit grows with it.
    whom: the process that this thread waits for without doing anything itself; DRIVER: there is no limit of its own.
    expected_s: seconds at worst, where no such work was seen yet.
    """
    if _beacon is None:
        yield
        return
    with _beacon.span(what, amount, whom, expected_s):
        yield


def advance(*, amount: float = 1.0) -> None:
    """Record that one part, of size `amount`, of this thread's work is done, and that the next begins."""
    if _beacon is not None:
        _beacon.advance(amount)


def show_stacks() -> None:
    """Let this process write the stacks of its threads, on SIGUSR2, into memory that `stacks_below` reads."""
    if hasattr(os, "memfd_create"):
        faulthandler.register(signal.SIGUSR2, file=os.fdopen(os.memfd_create(_STACKS), "w"))


def stacks_below(pid: int, wait_s: float = 1.0) -> dict[int, str]:
    """Read the stacks of all processes below this one that called `show_stacks`, by process id; Linux only."""
    found: dict[int, Path] = {}
    below = [pid]
    for parent in below:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for task in Path(f"/proc/{parent}/task").iterdir():
                below += map(int, (task / "children").read_text().split())
            for link in Path(f"/proc/{parent}/fd").iterdir():
                if parent != pid and _STACKS in os.readlink(link):
                    found[parent] = link
                    os.kill(parent, signal.SIGUSR2)
    time.sleep(wait_s if found else 0.0)
    texts = {}
    for process, link in found.items():
        with contextlib.suppress(OSError):
            texts[process] = link.read_text(errors="replace")
    return texts


def beacon_file(memory_id: str, log_path: str) -> Path:
    """Name the file into which the process with this log publishes.

    It lies in memory where the system has a folder for that, and is removed with the group's shared memory.
    """
    folder = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(log_path).parent
    return folder / f"{memory_id}_progress_{Path(log_path).stem}"


def read_beacon(path: Path) -> dict[str, Any] | None:
    """Read {"spans": [...], "collective": {...}} with the `age_s` of each span; None where there is none.

    The file must be of this machine, whose clock gives the ages.
    """
    for _ in range(5):  # it may be written at this moment
        try:
            found = json.loads(path.read_bytes().split(b"\0", 1)[0])
        except ValueError:
            time.sleep(0.01)
            continue
        except OSError:
            return None
        for each in found["spans"]:
            each["age_s"] = time.monotonic() - each.pop("since")
        return found
    return None
