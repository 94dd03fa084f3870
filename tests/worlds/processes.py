"""New processes that need not import what trains: each is a fork of a server that has it, one per session.

A Python that trains takes six seconds of CPU for its imports, most of them torch's and transformers', more than one of
this package's own. Nothing that the server imports reads the environment, a clock or the command line then. What is
tested about a start itself (signals, what is imported when, parents that die) takes a Python of its own all the same.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_METHOD = "forkserver"
_FORKS = multiprocessing.get_context(START_METHOD)
_FORKS.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.multiprocessing", "torch.distributed.fsdp"),
        *("torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict"),
        *("transformers.generation", "transformers.modeling_utils", "transformers.models.auto"),
        *("transformers.models.qwen2.modeling_qwen2", "safetensors.torch", "pyarrow.parquet", "hydra"),
        *("verl_like.trainer.command_line", "verl_like.trainer.run", "verl_like.cluster.local"),
        *("verl_like.workers.host", "verl_like.workers.roles", "verl_like.rollout.hf"),
        "tests.worlds.frozen",
    ]
)


def forks() -> ForkServerContext:
    """The context of multiprocessing whose processes are forks of the server, which runs from now on."""
    with chdir(ROOT):  # from where it imports this package
        forkserver.ensure_running()
    return _FORKS


def start(
    function: Callable[..., Any], *arguments: Any, out: Path, err: Path | None = None, **env: str
) -> ForkServerProcess:
    """A process that runs function(*arguments) in today's folder and environment; files take what it prints."""
    environment = {**os.environ, **env}
    arguments = (function, arguments, environment, os.getcwd(), (out, err or out))
    child = forks().Process(target=_in_child, args=arguments)
    child.start()
    return child


def run_module(
    module: str, arguments: Sequence[str], *, joined: bool = False, timeout: float = 240, **env: str
) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments`: its exit status, output and errors (`joined`: in one text, the output's)."""
    command = [module, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / ("out" if joined else "err")
        child = start(_as_main, module, list(arguments), out=out, err=err, **env)
        child.join(timeout)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired(command, timeout, out.read_bytes(), err.read_bytes())
        return subprocess.CompletedProcess(command, child.exitcode, out.read_text(), "" if joined else err.read_text())


def _in_child(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
    folder: str,
    logs: tuple[Path, Path],
) -> None:
    ours = sys.modules["verl_like"].__file__
    assert ours is not None and Path(ours).parent.parent == ROOT, f"the server has taken {ours}"
    os.environ.clear()  # it has the server's
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in zip((1, 2), logs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def _as_main(module: str, arguments: Sequence[str]) -> None:
    sys.argv = [module, *arguments]
    sys.orig_argv = [sys.executable, "-m", module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
