"""Serves runs inside the jail: has programs started by the zygote, watches them, and has them killed.

It reads requests and holds outputs, and no program is a copy of it (`zygote`). Programs hold none of its pipes, may not
signal it, and may not look into it. A jail may serve many programs: all that one leaves behind are files in the scratch
folder, which are deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import time
from typing import Any

from verl_like.plugins.code_grading.sandbox import seccomp, wire
from verl_like.plugins.code_grading.sandbox.settings import SandboxSettings
from verl_like.plugins.code_grading.sandbox.zygote import Zygote
from verl_like.services import cleaning

_ERROR_CHARS = 2000  # of stderr that is reported
_CLEANING_S = 2.0  # what takes longer to delete goes with the jail


class _Output:
    """Bytes read from one pipe, up to a limit."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self.descriptor, self.limit = descriptor, limit
        self.data = bytearray()
        self.over = False

    def read(self) -> bool:
        """Read once from the pipe. True if more may come."""
        data = os.read(self.descriptor, 65536)
        self.data += data[: max(0, self.limit - len(self.data))]
        self.over = self.over or (len(data) > 0 and len(self.data) >= self.limit)
        return bool(data) and not self.over


def serve(settings: SandboxSettings, zygote: Zygote, requests: int, replies: int, layers: list[str]) -> None:
    """Answer requests until the pipe closes."""
    wire.send(replies, {"layers": layers + (["seccomp"] if seccomp.supported() else [])})
    while (request := wire.receive(requests)) is not None:
        mode, timeout = request.pop("mode"), request.pop("timeout") or settings.timeout
        reply = (_run_tests if mode == "tests" else _run_one)(settings, zygote, timeout, request)
        zygote.end_all()
        reply["spent"] = False
        try:
            cleaning.empty_folder(os.getcwd(), time.monotonic() + _CLEANING_S)
            os.utime(os.getcwd(), (0, 0))  # not even its times tell the next program anything
        except OSError:  # the verdict stands; the worker closes this jail
            reply["spent"] = True
        wire.send(replies, reply)


def _run_one(settings: SandboxSettings, zygote: Zygote, timeout: float, request: dict[str, Any]) -> dict[str, Any]:
    """Run a whole program on its standard input, or one call of a function."""
    order_in, order_out = os.pipe()
    result_in, result_out = os.pipe()
    stdin = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    _fill(stdin, request.pop("stdin", ""))
    started = time.monotonic()
    program = _Started(settings, zygote, "run", {0: stdin, 3: result_out, 4: order_in})
    _close(stdin, result_out, order_in)
    _tell(order_out, request)
    result = _Output(result_in, settings.report_bytes)
    over = _watch([program.stdout, program.stderr, result], started + timeout)
    reply = program.end(over)
    os.close(result_in)
    return reply | {"result": result.data.decode("utf-8", "replace"), "seconds": time.monotonic() - started}


def _run_tests(settings: SandboxSettings, zygote: Zygote, timeout: float, request: dict[str, Any]) -> dict[str, Any]:
    """Run tests in one process, the code under test in another: they exchange plain data; only the first reports."""
    asked_in, asked_out = os.pipe()
    answered_in, answered_out = os.pipe()
    report_in, report_out = os.pipe()
    code_in, code_out = os.pipe()
    tests_in, tests_out = os.pipe()
    empty = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    _fill(empty, "")
    started = time.monotonic()
    candidate = _Started(settings, zygote, "answer", {0: empty, 3: answered_out, 4: asked_in, 5: code_in})
    ends = {0: empty, 3: asked_out, 4: answered_in, 5: report_out, 6: tests_in}
    tester = _Started(settings, zygote, "test", ends)
    _close(empty, asked_in, asked_out, answered_in, answered_out, report_out, code_in, tests_in)
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
        wire.send(descriptor, message)
    os.close(descriptor)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Started:
    """A process of the zygote's and the pipes of its output."""

    def __init__(self, settings: SandboxSettings, zygote: Zygote, body: str, descriptors: dict[int, int]) -> None:
        out_read, out_write = os.pipe()
        error_read, error_write = os.pipe()
        self._zygote = zygote
        self._pid = zygote.start(body, descriptors | {1: out_write, 2: error_write})
        _close(out_write, error_write)
        limit = settings.max_output_kb * 1024
        self.stdout, self.stderr = _Output(out_read, limit), _Output(error_read, limit)

    def end(self, over: str | None) -> dict[str, Any]:
        """Kill what still runs and say how it ended: ok, error, timeout, output or killed."""
        code = self._zygote.end(self._pid, wait=over is None)
        _close(self.stdout.descriptor, self.stderr.descriptor)
        status = over or ("ok" if code == 0 else "error" if code > 0 else "killed")
        if code == -signal.SIGXCPU:
            status = "timeout"
        errors = self.stderr.data.decode("utf-8", "replace")
        return {
            "status": status,
            "exit_code": code,
            "stdout": self.stdout.data.decode("utf-8", "surrogateescape"),
            "stderr": errors[-_ERROR_CHARS:],
        }


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


def _fill(memory_file: int, text: str) -> None:
    """Write the text for good: no process can change or enlarge the file any more."""
    data = memoryview(text.encode("utf-8", "surrogatepass"))
    while data:
        data = data[os.write(memory_file, data) :]
    os.lseek(memory_file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(memory_file, fcntl.F_ADD_SEALS, seals)
