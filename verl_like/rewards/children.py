"""Processes that a reward function starts in its worker, and that die: it may take the death of one for a 0."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import popen_fork, popen_forkserver
from typing import Any


@functools.cache
def watch() -> list[str]:
    """How children of this process have died so far; the list grows. Only those of multiprocessing, which Python's own
    pools start too: programs that a function runs may fail as they like. SIGTERM is how multiprocessing ends one."""
    deaths: list[str] = []

    def noting(self: Any, flag: int = os.WNOHANG, *, poll: Callable[..., int | None]) -> int | None:
        known, status = self.returncode, poll(self, flag)
        if known is None and status not in (None, 0, -signal.SIGTERM):
            deaths.append(f"exited with status {status}" if status > 0 else f"was killed by signal {-status}")
        return status

    for kind in (popen_fork.Popen, popen_forkserver.Popen):  # spawned ones use the first's
        kind.poll = functools.partialmethod(noting, poll=kind.poll)  # pyright: ignore
    return deaths


def last_death() -> str:
    """The last one, or "", also of a child that nobody has waited for yet."""
    multiprocessing.active_children()  # looks at each
    return next(reversed(watch()), "")
