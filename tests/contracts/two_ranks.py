"""A test file run again as a script, on two ranks: for engines that cannot live in the process of the tests."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.worlds.processes import start
from verl_like.cluster.environment import free_port

TIMEOUT_S = 400


def fork_on_two_ranks(script: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """`run_on_two_ranks` for ranks without vLLM: forks that have torch imported."""
    shared = [str(free_port("127.0.0.1")), str(folder), *arguments]
    ranks = [
        start(_as_script, script, [str(rank), *shared], out=folder / f"rank{rank}.log", OMP_NUM_THREADS="1")
        for rank in range(2)
    ]
    try:
        for number, rank in enumerate(ranks):
            rank.join(TIMEOUT_S)
            assert rank.exitcode == 0, (folder / f"rank{number}.log").read_text()[-6000:]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def _as_script(script: str, arguments: Sequence[str]) -> None:
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def run_on_two_ranks(script: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """`python script <rank> <port> <folder> <arguments>` twice; what each rank leaves in folder/rank<rank>.json."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])  # another vLLM, perhaps
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    shared = [str(free_port("127.0.0.1")), str(folder), *arguments]
    logs = [folder / f"rank{rank}.log" for rank in range(2)]  # files: a full pipe of one rank would stop both
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), *shared], env=env, stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate([path.open("w") for path in logs])
    ]
    try:
        for rank, log in zip(ranks, logs, strict=True):
            assert rank.wait(timeout=TIMEOUT_S) == 0, log.read_text()[-6000:]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
