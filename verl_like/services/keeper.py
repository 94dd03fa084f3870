"""The parent of a worker: when the worker ends, or the trainer does, nothing that it started is left.

    pool -> keeper (waits) -> worker (runs the service) -> whatever that starts

On Linux the keeper is a "subreaper": a process whose parent has ended becomes its child, whatever session or group it
made for itself, so everything the worker ever started is found below it in /proc. It runs no code of users'. Elsewhere
there is no keeper, and the worker's process group is all that is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

from verl_like.services import cleaning, kernel

END = signal.SIGUSR1  # ends a keeper and all below. Not SIGTERM: batch systems send that to every process of a job
_PATIENCE_S = 5.0


class _EndError(Exception):
    """Sign that the keeper was told to end, or that its parent has ended."""


def keep(parent_pid: int, descriptor: int, temporary: str) -> None:
    """Become two processes: this returns in the worker; the other one waits for it, and cleans up.

    descriptor: the worker's end of its channel.
    temporary: a folder to be deleted at the end.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the trainer's business: it finishes its step and closes the pool
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {END})
        signal.signal(END, _end)
        kernel.die_with_parent(END)
        if os.getppid() != parent_pid:  # it died before the call above
            os._exit(1)
        kernel.adopt_orphans()
        keeper_pid = os.getpid()
        worker_pid = os.fork()
        if worker_pid:
            os.close(descriptor)
            _guard(worker_pid, temporary)
        kernel.die_with_parent()
        if os.getppid() != keeper_pid:
            os._exit(1)
        signal.signal(END, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {END})
    else:
        threading.Thread(target=_watch, args=(parent_pid,), daemon=True).start()
    # What the worker starts must heed SIGTERM: programs do, as a handler, unlike SIG_IGN, is not passed on to them.
    signal.signal(signal.SIGTERM, _ignore)
    os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_heed_sigterm)


def _end(number: int, frame: object) -> None:
    signal.signal(END, signal.SIG_IGN)
    raise _EndError


def _ignore(number: int, frame: object) -> None:
    pass


def _hold_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a fork is not to miss one before it heeds it


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _heed_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _ignore:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release_sigterm()


def _guard(worker_pid: int, temporary: str) -> None:
    """Wait for the worker, then end what is left of it, and this process as the worker ended."""
    pid, status = 0, 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {END})
        while pid != worker_pid:  # others are orphans
            pid, status = os.waitpid(-1, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {END})  # often right after the worker's end: not to cut short the rest
    except _EndError:
        pass
    try:
        end_all_below()
        with contextlib.suppress(OSError):
            cleaning.empty_folder(temporary)
            os.rmdir(temporary)
        if os.WIFSIGNALED(status):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with contextlib.suppress(OSError):  # SIGKILL has no handler to put back
                signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
            os.kill(os.getpid(), os.WTERMSIG(status))
    finally:
        os._exit(os.WEXITSTATUS(status))


def end_all_below() -> None:
    """Kill every process below this one, and take note of their ends; what cannot be killed is waited for 5 seconds."""
    deadline = time.monotonic() + _PATIENCE_S
    while (found := below(os.getpid())) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.001)
    _reap()  # the last ones: process 1 of a container may leave zombies that it inherits


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def below(root: int) -> list[int]:
    """Live processes that descend from `root`, by /proc/<pid>/stat: pid (name) state parent ..."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:  # it has just ended
                continue
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
    found, seen = [root], 0
    while seen < len(found):
        found += children.get(found[seen], [])
        seen += 1
    return found[1:]


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    os._exit(1)
