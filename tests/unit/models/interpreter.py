"""Triton kernels without a GPU: the interpreter is switched on before triton is imported, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def run_interpreted(code: str, timeout_s: float) -> None:
    """Run Python code under Triton's interpreter; its failure is the test's."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
