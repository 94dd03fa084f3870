"""Serves runs inside the jail: a process of its own for each, which starts, watches and kills the program.

    zygote (process 1 inside) -> supervisor of one run -> the program; for assert-style tests two processes

A program starts as a copy of its parent's memory, so that must be empty. The zygote never reads a request, and a
supervisor reads no more than the kind of run before it has forked the processes of that run; they are told through
pipes what to do. Nothing of other runs, and no expected output, is in any memory that a program is a copy of. Programs
hold none of the supervisor's pipes, may not signal it, and may not look into it. A jail may serve many programs: all
that one leaves behind are files in the scratch folder, which are deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import selectors
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

from verl_like.rewards.sandbox import child, cleaning, framing, kernel, seccomp
from verl_like.rewards.sandbox.settings import SandboxError, SandboxSettings

_ERROR_CHARS = 2000  # of stderr that is reported
_CLEANING_S = 2.0  # what takes longer to delete goes with the jail
_NO_MORE = 3  # exit status of a supervisor that found the pipe of requests closed


class _Output:
    """What arrives through one pipe, up to a limit."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self.descriptor, self.limit = descriptor, limit
        self.data = bytearray()
        self.over = False

    def read(self) -> bool:
        """Whether more may come."""
        data = os.read(self.descriptor, 65536)
        self.data += data[: max(0, self.limit - len(self.data))]
        self.over = self.over or (len(data) > 0 and len(self.data) >= self.limit)
        return bool(data) and not self.over


def serve(settings: SandboxSettings, requests: int, replies: int, layers: list[str]) -> None:
    """Answer requests until the pipe closes: each from a fork of this process, which stays as it is."""
    if seccomp.supported():
        layers = [*layers, "seccomp"]
        seccomp.build(own_pid=0, may_fork=settings.max_processes > 1)  # once, for all forks
    framing.send(replies, {"layers": layers})
    alone = os.getpid() == 1
    gc.disable()
    gc.freeze()  # forks share its memory longer
    while True:
        pid = os.fork()
        if not pid:
            _become_supervisor(settings, requests, replies, alone)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == _NO_MORE:
            return
        if status:
            raise SandboxError(f"a supervisor ended with status {status}")


def _become_supervisor(settings: SandboxSettings, requests: int, replies: int, alone: bool) -> None:
    status = 70
    try:
        kernel.die_with_parent()
        kernel.adopt_orphans()
        status = _serve_one(settings, requests, replies, alone)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _serve_one(settings: SandboxSettings, requests: int, replies: int, alone: bool) -> int:
    """One run. `alone`: all processes that can be seen, but for process 1, belong to it."""
    kind = framing.receive(requests)
    if kind is None:
        return _NO_MORE
    run = _run_tests if kind["mode"] == "tests" else _run_one
    reply = run(settings, kind["timeout"] or settings.timeout, requests)
    _kill_all(alone)
    reply["spent"] = False
    try:
        cleaning.empty_folder(os.getcwd(), time.monotonic() + _CLEANING_S)
        os.utime(os.getcwd(), (0, 0))  # not even its times tell the next program anything
    except OSError:  # the verdict stands; the worker closes this jail
        reply["spent"] = True
    framing.send(replies, reply)
    return 0


def _run_one(settings: SandboxSettings, timeout: float, requests: int) -> dict[str, Any]:
    """A whole program on its standard input, or one call of a function."""
    order_in, order_out = os.pipe()
    result_in, result_out = os.pipe()
    stdin = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    started = time.monotonic()
    program = _Started(settings, child.run, {0: stdin, 3: result_out, 4: order_in})
    _close(result_out, order_in)
    request = framing.receive(requests)  # only now: the program is no copy of this
    _fill(stdin, request.pop("stdin", ""))
    _tell(order_out, request)
    result = _Output(result_in, settings.report_bytes)
    over = _watch([program.stdout, program.stderr, result], started + timeout)
    reply = program.end(over)
    os.close(result_in)
    return reply | {"result": result.data.decode("utf-8", "replace"), "seconds": time.monotonic() - started}


def _run_tests(settings: SandboxSettings, timeout: float, requests: int) -> dict[str, Any]:
    """Tests in one process, the code under test in another: they exchange plain data, and only the first reports."""
    asked_in, asked_out = os.pipe()
    answered_in, answered_out = os.pipe()
    report_in, report_out = os.pipe()
    code_in, code_out = os.pipe()
    tests_in, tests_out = os.pipe()
    empty = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    _fill(empty, "")
    started = time.monotonic()
    candidate = _Started(settings, child.answer, {0: empty, 3: answered_out, 4: asked_in, 5: code_in})
    ends = {0: empty, 3: asked_out, 4: answered_in, 5: report_out, 6: tests_in}
    tester = _Started(settings, child.test, ends)
    _close(empty, asked_in, asked_out, answered_in, answered_out, report_out, code_in, tests_in)
    request = framing.receive(requests)  # only now: neither process is a copy of this
    _tell(code_out, {"code": request.pop("code")})
    _tell(tests_out, request)
    report = _Output(report_in, settings.report_bytes)
    pipes = [tester.stdout, tester.stderr, candidate.stdout, candidate.stderr, report]
    over = _watch(pipes, started + timeout, until=report)
    reply = candidate.end(over)
    tested = tester.end(over)
    os.close(report_in)
    return reply | {
        "status": tested["status"],
        "tester_stderr": tested["stderr"],
        "result": report.data.decode("utf-8", "replace"),
        "seconds": time.monotonic() - started,
    }


def _tell(descriptor: int, message: dict[str, Any]) -> None:
    """Send a fresh process what it is to do, and close its pipe."""
    with contextlib.suppress(BrokenPipeError):  # it has ended: its status tells why
        framing.send(descriptor, message)
    os.close(descriptor)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Started:
    """A child process and the pipes of its output."""

    def __init__(self, settings: SandboxSettings, body: Callable[[], None], descriptors: dict[int, int]) -> None:
        out_read, out_write = os.pipe()
        error_read, error_write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            child.become(settings, descriptors | {1: out_write, 2: error_write}, body)
        os.close(out_write)
        os.close(error_write)
        limit = settings.max_output_kb * 1024
        self.stdout, self.stderr = _Output(out_read, limit), _Output(error_read, limit)

    def end(self, over: str | None) -> dict[str, Any]:
        """Kill what still runs and say how it ended: ok, error, timeout, output or killed."""
        code = self._exit_code(wait=over is None)
        os.close(self.stdout.descriptor)
        os.close(self.stderr.descriptor)
        status = over or ("ok" if code == 0 else "error" if code > 0 else "killed")
        if code == -signal.SIGXCPU:
            status = "timeout"
        errors = self.stderr.data.decode("utf-8", "replace")
        return {
            "status": status,
            "exit_code": code,
            "stdout": self.stdout.data.decode("utf-8", "replace"),
            "stderr": errors[-_ERROR_CHARS:],
        }

    def _exit_code(self, wait: bool) -> int:
        if wait:  # its pipes are closed: it is about to end, unless it closed them itself
            for _ in range(50):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.002)
        for kill, target in ((os.killpg, self.pid), (os.kill, self.pid)):
            try:
                kill(target, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # gone already, or not yet a group of its own
                continue
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _watch(outputs: list[_Output], deadline: float, until: _Output | None = None) -> str | None:
    """Read until all pipes (or `until`) are closed. "timeout" or "output" if a limit was hit first."""
    with selectors.DefaultSelector() as selector:
        for output in outputs:
            selector.register(output.descriptor, selectors.EVENT_READ, output)
        while selector.get_map():
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events and time.monotonic() >= deadline:
                return "timeout"
            for key, _ in events:
                output = key.data
                if not output.read():
                    selector.unregister(output.descriptor)
                    if output.over:
                        return "output"
                    if output is until:
                        return None
    return None


def _kill_all(alone: bool) -> None:
    """No process of a run survives it, wherever it hid."""
    if alone:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # everything in this process namespace but process 1 and ourselves
    while True:
        try:
            pid, _ = os.waitpid(-1, 0 if alone else os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return


def _fill(memory_file: int, text: str) -> None:
    """Write the text, for good: nobody can change or enlarge the file any more."""
    data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(memory_file, data) :]
    os.lseek(memory_file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(memory_file, fcntl.F_ADD_SEALS, seals)
