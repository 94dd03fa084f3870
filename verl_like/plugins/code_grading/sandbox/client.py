"""The jail as seen from a reward worker: start it, give it runs, kill it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from verl_like.plugins.code_grading.sandbox import wire
from verl_like.plugins.code_grading.sandbox.settings import SandboxError, SandboxSettings
from verl_like.services import cleaning

logger = logging.getLogger(__name__)

_BOOTSTRAP = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from verl_like.plugins.code_grading.sandbox import jail; sys.path.pop(); "
    "jail.main(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))"
)
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[4])
_START_S = 20.0
_GRACE_S = 5.0  # the supervisor ends a run at its time limit; silent for longer, the jail itself is stuck


class Jail:
    """A locked-down process that runs programs one at a time. It may serve many responses.

    Raises SandboxError when it cannot be started or dies. Not safe for use by several threads.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self._scratch = tempfile.mkdtemp(prefix="verl_like_jail_")
        requests_read, self._requests = os.pipe()
        self._replies, replies_write = os.pipe()
        arguments = [_PACKAGE_PARENT, settings.to_json(), self._scratch, str(requests_read), str(replies_write)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-P", "-B", "-c", _BOOTSTRAP, *arguments, str(os.getpid())],
                pass_fds=[requests_read, replies_write],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
                cwd="/",
            )
        finally:
            os.close(requests_read)
            os.close(replies_write)
        self.layers: list[str] | None = None

    def wait_until_ready(self) -> list[str]:
        """Wait until the jail is up, and list its protective layers by name."""
        if self.layers is None:
            self.layers = list(self._receive(_START_S)["layers"])
        return self.layers

    def run_program(self, code: str, stdin: str, *, timeout: float | None = None) -> dict[str, Any]:
        """Run a whole program: status, exit_code, stdout, stderr, seconds."""
        return self._run("program", timeout, {"code": code, "stdin": stdin})

    def call(self, code: str, function: str, arguments: list[Any], *, timeout: float | None = None) -> dict[str, Any]:
        """Run the code, then one function of it; its value (see `wire`) is in `result`."""
        return self._run("call", timeout, {"code": code, "function": function, "arguments": arguments})

    def test(
        self, code: str, tests: str, *, setup: str = "", entry: str = "", timeout: float | None = None
    ) -> dict[str, Any]:
        """Run assert statements, in a process of their own, against functions of `code`; report lines in `result`."""
        return self._run("tests", timeout, {"code": code, "tests": tests, "setup": setup, "entry": entry})

    def close(self) -> None:
        """Kill everything inside. Safe to call twice."""
        if self.closed:
            return
        assert self._process.stderr is not None
        self._process.kill()  # the supervisor is killed with it by the kernel, and everything else with that
        self._process.wait()
        self._process.stderr.close()
        os.close(self._requests)
        os.close(self._replies)
        self._delete_scratch()

    def _delete_scratch(self) -> None:
        """Delete the scratch folder.

        Without namespaces it is full of files, and a dying program may be adding some more.
        """
        for _ in range(20):
            try:
                cleaning.empty_folder(self._scratch)
                os.rmdir(self._scratch)
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.05)
        logger.warning("the sandbox's folder %s could not be deleted", self._scratch)

    def __enter__(self) -> Jail:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._process.stderr is None or self._process.stderr.closed

    def _run(self, mode: str, timeout: float | None, request: dict[str, Any]) -> dict[str, Any]:
        self.wait_until_ready()
        try:
            wire.send(self._requests, {"mode": mode, "timeout": timeout, **request})
        except BrokenPipeError:
            raise self._dead() from None
        reply = self._receive(self.settings.timeout + _GRACE_S)
        if reply["spent"]:
            self.close()
        return reply

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            reply = wire.receive(self._replies, time.monotonic() + seconds, self.settings.reply_bytes)
        except TimeoutError:
            self.close()
            raise SandboxError(f"the sandbox did not answer within {seconds:g} s") from None
        if reply is None:
            raise self._dead()
        return reply

    def _dead(self) -> SandboxError:
        self._process.kill()
        _, errors = self._process.communicate()
        self.close()
        return SandboxError(f"the sandbox process died: {errors.decode(errors='replace')[-1500:].strip()}")
