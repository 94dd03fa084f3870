"""Triton kernels without a GPU: the interpreter is switched on before triton is imported, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def take_float_arguments() -> None:
    """Teach the interpreter of this process what compiled kernels do: take a Python float as a float32 number."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    usual = interpreter._implicit_cvt

    def convert(argument: object) -> object:
        if not isinstance(argument, float):
            return usual(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = convert


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
