"""Tests that run with cuda turned into cpu: in a pytest of their own, whose processes have the twin from the start."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 1200  # on cores that others use too
ROOT = Path(__file__).resolve().parents[2]


def lines_of(factory: pytest.TempPathFactory) -> Path:
    """Folder in which all processes inside the twin note which of the lines for CUDA alone they ran."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cuda-lines"
    folder.mkdir(exist_ok=True)
    return folder


def environment(devices: int = 1, lines: Path | None = None) -> dict[str, str]:
    """Variables of a process that has the twin, as have all that it starts. lines: folder for the lines that ran."""
    path = os.pathsep.join((str(ROOT / "tests" / "twin" / "site"), str(ROOT)))
    found = {**os.environ, "PYTHONPATH": path, "TWIN": str(devices), "OMP_NUM_THREADS": "1"}
    return found if lines is None else found | {"TWIN_LINES": str(lines)}


def run_inside(
    *arguments: str,
    devices: int = 1,
    lines: Path | None = None,
    timeout: int = TIMEOUT_S - 20,
) -> str:
    """Run pytest inside the twin with these arguments; a failure there is one here. Returns its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "tests.twin.dry_run", "--timeout", str(timeout)]
    ended = "failed"  # also by the time limit: nobody waits for it longer
    try:
        done = subprocess.run(
            [*command, "-rs", *arguments],
            env=environment(devices, lines),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-4_000:]
        ended = "done"
    finally:
        if lines is not None:
            (lines / f"{secrets.token_hex(4)}.{ended}").touch()
    return done.stdout
