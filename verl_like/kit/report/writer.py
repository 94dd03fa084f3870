"""Writes the report of a run that goes on: in a process of its own, so that it costs the driver nothing and a failure
in it is a warning, never the end of a run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

_LONGEST = 120.0  # s: that a run waits for its last report
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]


class ReportWriter:
    """Writer of `<folder>/report.html` every `every` steps and at the end; every = -1: never."""

    def __init__(self, folder: Path, every: int, command: tuple[str, ...] = ()) -> None:
        """Take the folder and the interval.

        command: takes the place of the program that writes the report (tests).
        """
        self.folder, self.every = folder, every
        self._command = command or (sys.executable, "-m", "verl_like.kit.report", str(folder))
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._warned = False

    def step_finished(self, step: int) -> None:
        """Begin a report where one is due, unless the last one is still being written."""
        self._started = True
        if self.every > 0 and step % self.every == 0 and not self._running():
            self._start()

    def finish(self) -> None:
        """Write the last report and wait for it; nothing where no step was finished. May be called twice."""
        if self.every < 1 or not self._started:
            return
        self._started = False
        self._wait()
        self._start()
        self._wait()
        if not self._warned:
            logger.info("report: %s", self.folder / "report.html")

    def _start(self) -> None:
        path = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,  # a traceback is far smaller than the pipe
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the run, which then ends in order
            )
        except OSError as error:
            self._warn(str(error))

    def _running(self) -> bool:
        if self._process is None:
            return False
        status = self._process.poll()
        if status is None:
            return True
        if status != 0:
            lines = self._process.communicate()[1].decode(errors="replace").strip().splitlines()
            self._warn(lines[-1] if lines else f"exit status {status}")
        if self._process.stderr is not None:
            self._process.stderr.close()
        self._process = None
        return False

    def _wait(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(_LONGEST)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._warn(f"it took more than {_LONGEST:.0f} s")
        self._running()

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("report.html could not be written (said once; the run goes on): %s", reason)
