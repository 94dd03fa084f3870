"""The process that forks programs: it holds nothing of any run, so there is nothing in a program's memory to be found.

zygote (process 1 inside) -> supervisor (reads requests, holds outputs; tells the zygote whom to start and to end)
                          -> the programs, which get their pipes from the supervisor, and their orders through them
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import time
import traceback
from typing import Any

from verl_like.plugins.code_grading.sandbox import child, seccomp
from verl_like.plugins.code_grading.sandbox.settings import SandboxSettings
from verl_like.services import kernel

_MOST_BYTES, _MOST_DESCRIPTORS = 1024, 16


class Zygote:
    """The zygote as seen from the supervisor."""

    def __init__(self, control: socket.socket, alone: bool) -> None:
        self._control, self._alone = control, alone

    def start(self, body: str, descriptors: dict[int, int]) -> int:
        """Fork a process that runs this function of `child` with these descriptors (number there -> here); its id."""
        order = json.dumps({"start": body, "targets": list(descriptors)}).encode()
        socket.send_fds(self._control, [order], list(descriptors.values()))
        return self._answer()

    def end(self, pid: int, *, wait: bool) -> int:
        """Reap a process and return its code, as subprocess.returncode has it.

        wait: the process is about to end by itself; otherwise it is killed.
        """
        self._control.send(json.dumps({"end": pid, "wait": wait}).encode())
        return self._answer()

    def end_all(self) -> None:
        """Kill all processes of a run, wherever they hide.

        Without namespaces there are no others than those that were ended.
        """
        while self._alone:
            try:
                os.kill(-1, signal.SIGKILL)  # everything in this process namespace but the zygote and ourselves
            except ProcessLookupError:
                return
            self._control.send(json.dumps({"reap": True}).encode())
            self._answer()
            time.sleep(0.001)

    def _answer(self) -> int:
        return int(self._control.recv(_MOST_BYTES))


def split(settings: SandboxSettings, *private: int) -> Zygote:
    """Become two processes: this returns in the supervisor, which alone keeps the `private` descriptors."""
    if seccomp.supported():
        seccomp.build(own_pid=0, may_fork=settings.max_processes > 1)  # once, for all forks
    alone = os.getpid() == 1
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        kernel.die_with_parent()
        theirs.close()
        return Zygote(ours, alone)
    ours.close()
    for descriptor in private:
        os.close(descriptor)
    status = 70
    try:
        _serve(settings, theirs)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _serve(settings: SandboxSettings, control: socket.socket) -> None:
    """Obey the supervisor until it ends."""
    gc.disable()
    gc.freeze()  # forks share its memory longer
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not data:
            return
        order: dict[str, Any] = json.loads(data)
        answer = 0
        if "start" in order:
            answer = os.fork()
            if not answer:
                pairs = dict(zip(order["targets"], descriptors, strict=True))
                child.become(settings, pairs, getattr(child, order["start"]))
            for descriptor in descriptors:
                os.close(descriptor)
        elif "end" in order:
            answer = _end(order["end"], order["wait"])
        else:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        control.send(str(answer).encode())


def _end(pid: int, wait: bool) -> int:
    if wait:  # its pipes are closed: it is about to end, unless it closed them itself
        for _ in range(50):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already, or not yet a group of its own
            kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
