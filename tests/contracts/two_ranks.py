"""A test file run again as a script, on two ranks: for engines that cannot live in the process of the tests."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.worlds.processes import start
from verl_like.cluster.environment import free_port

TIMEOUT_S = 400


def run_on_two_ranks(script: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """`python script <rank> <port> <folder> <arguments>` twice; what each rank leaves in folder/rank<rank>.json."""
    shared = [str(free_port("127.0.0.1")), str(folder), *arguments]
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    ranks = [start(_run, script, [str(rank), *shared], out=log, OMP_NUM_THREADS="1") for rank, log in enumerate(logs)]
    try:
        for rank, log in zip(ranks, logs, strict=True):
            rank.join(TIMEOUT_S)
            assert rank.exitcode == 0, log.read_text()[-6000:]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def _run(script: str, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
