"""Serves runs inside the jail: one forked child per program, watched and killed from here.

The supervisor, of which every child is a copy, holds the program's text and its inputs and never an expected output:
tests are read by the process that runs them alone. Programs hold none of its pipes, may not signal it, and may not look
into it. A jail may serve many programs: all that one leaves behind are files in the scratch folder, which are deleted.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from typing import Any

from verl_like.rewards.sandbox import child, framing, seccomp
from verl_like.rewards.sandbox.settings import SandboxSettings

_ERROR_CHARS = 2000  # of stderr that is reported
_REPORT_BYTES = 16 * 1024**2  # of results and test reports


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
    """Answer requests until the pipe closes."""
    framing.send(replies, {"layers": layers + (["seccomp"] if seccomp.supported() else [])})
    while (request := framing.receive(requests)) is not None:
        if request["mode"] == "tests":
            reply = _run_tests(settings, request, requests)
        else:
            reply = _run_one(settings, request)
        _kill_all()
        _empty(os.getcwd())
        framing.send(replies, reply)


def _run_one(settings: SandboxSettings, request: dict[str, Any]) -> dict[str, Any]:
    """A whole program on its standard input, or one call of a function."""
    result_in, result_out = os.pipe()
    stdin = _memory_file(request.get("stdin", ""))
    started = time.monotonic()
    program = _Started(settings, lambda: child.run(request), {0: stdin, 3: result_out})
    os.close(stdin)
    os.close(result_out)
    result = _Output(result_in, _REPORT_BYTES)
    over = _watch([program.stdout, program.stderr, result], started + (request["timeout"] or settings.timeout))
    reply = program.end(settings, over)
    os.close(result_in)
    return reply | {"result": result.data.decode("utf-8", "replace"), "seconds": time.monotonic() - started}


def _run_tests(settings: SandboxSettings, request: dict[str, Any], requests: int) -> dict[str, Any]:
    """Tests in one process, the code under test in another: they exchange plain data, and only the first reports.

    The tests are the next message of the `requests` pipe, which the first process reads itself.
    """
    asked_in, asked_out = os.pipe()
    answered_in, answered_out = os.pipe()
    report_in, report_out = os.pipe()
    empty = _memory_file("")
    started = time.monotonic()
    candidate = _Started(settings, lambda: child.answer(request), {0: empty, 3: answered_out, 4: asked_in})
    ends = {0: empty, 3: asked_out, 4: answered_in, 5: report_out, 6: requests}
    tester = _Started(settings, child.test, ends)
    for descriptor in (empty, asked_in, asked_out, answered_in, answered_out, report_out):
        os.close(descriptor)
    report = _Output(report_in, _REPORT_BYTES)
    pipes = [tester.stdout, tester.stderr, candidate.stdout, candidate.stderr, report]
    over = _watch(pipes, started + (request["timeout"] or settings.timeout), until=report)
    reply = candidate.end(settings, over)
    tested = tester.end(settings, over)
    os.close(report_in)
    return reply | {
        "status": tested["status"],
        "tester_stderr": tested["stderr"],
        "result": report.data.decode("utf-8", "replace"),
        "seconds": time.monotonic() - started,
    }


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

    def end(self, settings: SandboxSettings, over: str | None) -> dict[str, Any]:
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


def _kill_all() -> None:
    """No process of a run survives it, wherever it hid."""
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # everything in this process namespace but ourselves
    while True:
        try:
            pid, _ = os.waitpid(-1, 0 if os.getpid() == 1 else os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return


def _memory_file(text: str) -> int:
    descriptor = os.memfd_create("stdin")
    data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _empty(folder: str) -> None:
    """Delete what a program left behind, also what it made unreadable. OSError, which ends the jail, if that fails."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, 0o700)
            _empty(path)
            os.rmdir(path)
        else:
            os.unlink(path)
