"""Orderly ends: signals in the driver, signals in the workers, fate sharing, shared memory.

A first Ctrl-C (or SIGTERM) only asks the loop to stop: it finishes its step, saves and leaves. A second one aborts.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from types import FrameType
from typing import Any

from verl_like.cluster.janitor import kill_processes, processes_of_run

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1


class StopFlag:
    """Flag of a request to stop the run."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.passed_on = False  # by a worker: this process's own signal may still come

    @property
    def requested(self) -> bool:
        return self.signal_name is not None


@contextmanager
def graceful_interrupt() -> Iterator[StopFlag]:
    """Turn the first SIGINT or SIGTERM into a flag that the loop looks at; a second one raises KeyboardInterrupt.

    Enter it in the main thread, after Ray was connected. In another thread signals keep their usual effect.
    """
    flag = StopFlag()

    def on_signal(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if flag.passed_on:
            flag.passed_on = False
            return
        if flag.requested:
            raise KeyboardInterrupt(f"second {name}: aborted without saving", number)
        flag.signal_name = name
        logger.warning("%s: the run stops at the next safe point. Send it again to abort at once.", name)

    if threading.current_thread() is not threading.main_thread():
        logger.warning("not in the main thread: Ctrl-C will end the run without saving")
        yield flag
        return
    previous = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    _flags.append(flag)
    try:
        yield flag
    finally:
        _flags.remove(flag)
        for number, handler in previous.items():
            signal.signal(number, handler)


_flags: list[StopFlag] = []  # of `graceful_interrupt`, the innermost last


def pass_on_sigterm(who: str) -> None:
    """Treat a worker's SIGTERM (its machine is to go, perhaps) as this process's own, unless that has had one."""
    if not _flags:
        os.kill(os.getpid(), signal.SIGTERM)
    elif not _flags[-1].requested:
        _flags[-1].signal_name, _flags[-1].passed_on = "SIGTERM", True
        logger.warning("%s got a SIGTERM: the run stops at the next safe point", who)


def leave_signals_to_driver() -> None:
    """Live on after Ctrl-C (worker processes share the driver's terminal) and after a SIGTERM to all processes of a job
    (Slurm, containers): the driver decides when they end, and they die with it. Call it in the main thread.

    SIGTERM keeps its effect on the children: a program started from here has handlers no more, a fork is put right.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _note)
    signal.siginterrupt(signal.SIGTERM, False)  # system calls of native code go on
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked by `sigterm_blocked`, below Ray's daemons
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


_terminated = False


def _note(number: int, frame: FrameType | None) -> None:
    global _terminated
    _terminated = True


def terminated() -> bool:
    """True where this worker got a SIGTERM.

    The driver hears of it with the next answer (a machine that is to go may be another one than the driver's), and ends
    the run as if it had got the signal itself.
    """
    return _terminated


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Protect processes started in the block, and all below them, from SIGTERM, unless they unblock it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def name_shared_memory(run_id: str) -> None:
    """Put the run's id into the names that Python gives to shared memory (vLLM's message queues), else "psm_" and
    chance: so `cleanup_shm` finds what a killed process left."""
    prefix = f"/psm_{run_id}_"
    module: Any = shared_memory
    module._SHM_NAME_PREFIX = prefix
    module._SHM_SAFE_NAME_LENGTH = len(prefix) + 8  # of which 8 are random; the limit of 14 is that of other systems


def die_with_parent() -> None:
    """Have the kernel kill this process when the process that started it ends (Linux; elsewhere Ray's own check)."""
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def kill_orphans(run_id: str) -> list[int]:
    """Kill this machine's processes of the run that are no longer below this process; returns their ids."""
    own = os.getpid()
    orphans = [pid for pid in processes_of_run(run_id) if own not in _ancestors(pid)]
    kill_processes(orphans)
    return orphans


def _ancestors(pid: int) -> list[int]:
    chain: list[int] = []
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                pid = int(file.read().rsplit(")", 1)[1].split()[1])
        except OSError:  # ended meanwhile
            break
        chain.append(pid)
    return chain
