"""A program that serves HTTP for the run: started, waited for, looked after, and ended with all that it started."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_like.services import keeper
from verl_like.services.temp_folder import TempFolder

# The keeper's worker becomes the program: what it starts ends with it, and it ends with this process.
_BOOTSTRAP = (
    "import json, os, sys; sys.path[:] = json.loads(sys.argv[3]); from verl_like.services.keeper import keep; "
    "keep(int(sys.argv[1]), os.open(os.devnull, os.O_RDONLY), sys.argv[2]); os.execvp(sys.argv[4], sys.argv[4:])"
)
_LOOK_S = 0.2
_END_S = 15.0
_TAIL_BYTES, _TAIL_LINES = 8192, 15


class ServerError(RuntimeError):
    """The server did not start, or is not there any more."""


class Server:
    """Program that serves HTTP for the run. Call `start` and `wait_ready`, then `end`.

    health: the URL that answers 200 once the program serves.
    log: file of its output, appended to.
    environment: variables on top of this process's.
    """

    def __init__(self, command: Sequence[str], *, health: str, log: Path, environment: Mapping[str, str]) -> None:
        self._command, self._health, self.log = list(command), health, log
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: TempFolder | None = None  # of the program

    def start(self) -> None:
        """Start the program; returns at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = TempFolder()
        arguments = [str(os.getpid()), self._temporary.path, json.dumps(sys.path), *self._command]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment, "TMPDIR": self._temporary.path},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Id of the process that looks after the server."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def wait_ready(self, timeout_s: float) -> None:
        """Return when it serves. Raises ServerError, with the end of its log, when it ended or takes longer."""
        deadline = time.monotonic() + timeout_s
        while not answers(self._health, _LOOK_S * 10):
            if (ended := self.ended()) or time.monotonic() > deadline:
                what = ended or f"does not serve after {timeout_s:g} s"
                self.end()
                raise ServerError(f"the server {what}; the end of {self.log}:\n{tail(self.log)}")
            time.sleep(_LOOK_S)

    def ended(self) -> str:
        """Describe the server's end; "" while it runs."""
        assert self._process is not None, "the server was not started"
        code = self._process.poll()
        return "" if code is None else f"has ended (exit code {code})"

    def end(self) -> None:
        """Kill the program, and everything that it started. Safe to call twice."""
        if self._process is None or self._temporary is None:
            return
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, keeper.END)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):  # what is left of its group, also where the keeper was killed
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._temporary.remove()
        self._temporary = None


# To servers of the run: the variables http_proxy and the like are meant for the world outside.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(url: str, timeout_s: float) -> bool:
    """True where a GET of this URL is answered with 200, without a proxy."""
    try:
        with DIRECT.open(url, timeout=timeout_s) as reply:
            return reply.status == 200
    except (OSError, ValueError, http.client.HTTPException):  # nobody listens, or says something else than HTTP
        return False


def tail(log: Path) -> str:
    """The last lines of a file."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:])
