"""A run that is killed again and again at moments left to chance, beside one that was not: nothing may be lost but the
step under way.

    python -m benchmarks.kills --algorithm grpo --kills 85              one process (launcher=local, hf engine)
    python -m benchmarks.kills --algorithm ppo --kills 15 --vllm        two ranks under Ray with vLLM

In one process the run itself is killed; its starts are forks of a process that has imported everything, so that a kill
costs a second or two. Under Ray rank 0, rank 1 and the driver in turns: the run begins again by itself
(trainer.max_restarts) where a rank is lost, and is started again where the driver is.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.faults import facts, write_model
from tests.conftest import ROOT
from tests.e2e.support import overrides, shm_left_behind, write_task
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"algorithm.adv_estimator": "gae", "critic.ppo_mini_batch_size": 8, "critic.optim.lr": 3e-3},
}
ON_RAY = {
    "trainer.launcher": "ray",
    "trainer.n_gpus_per_node": 2,
    "actor_rollout_ref.rollout.name": "vllm",
    "trainer.max_restarts": 20,
    "trainer.restart_delay": 0.1,
}
_SILENT_S = 300.0  # a run that does nothing for so long is stuck


@dataclass(slots=True, kw_only=True)
class Ledger:
    """of: whom each kill met. lost: by each kill, the finished steps (in the metrics) that were in no checkpoint; 1 is
    the step under way, between its metrics and its commit. different: names of metrics that are not those of the run
    that was not killed."""

    algorithm: str
    engine: str
    steps: int
    seconds: float = 0.0
    of: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    starts: int = 1
    steps_once: bool = False
    different: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return len(self.of)


class Process(Protocol):
    """A run under way."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status, or None."""
        ...


class Forked:
    """A run in a fork of this process."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.pid, self._status = os.fork(), None
        if self.pid == 0:
            status = 1
            try:
                file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
                os.dup2(file, 1), os.dup2(file, 2)
                train(compose(arguments))
                status = 0
            finally:
                os._exit(status)

    def poll(self) -> int | None:
        """See Process."""
        if self._status is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._status = os.waitstatus_to_exitcode(found[1])
        return self._status


def started(arguments: Sequence[str], log: Path, *, forked: bool) -> Process:
    """The run, its output in the file."""
    if forked:
        return Forked(arguments, log)
    with log.open("w") as file:
        command = [sys.executable, "-m", "verl_like.trainer.main_ppo", *arguments]
        settings = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=ROOT, env=settings, stdout=file, stderr=file)


def finished(arguments: Sequence[str], log: Path, *, forked: bool) -> None:
    """A run that nothing happens to."""
    process = started(arguments, log, forked=forked)
    while process.poll() is None:
        time.sleep(0.1)
    assert process.poll() == 0, log.read_text()[-3000:]


def killed_run(folder: Path, algorithm: str, kills: int, *, vllm: bool, seed: int = 0, minutes: float = 1e9) -> Ledger:
    """So many kills (or as many as the minutes allow), then the run to its end, compared."""
    began, chance, out, log = time.monotonic(), random.Random(seed), folder / "out", folder / "log"
    steps = 3 * kills + 5
    settings = {**ALGORITHMS[algorithm], **(ON_RAY if vllm else {})}
    settings |= {"trainer.save_freq": 1, "trainer.test_freq": 5, "trainer.total_training_steps": steps}
    settings |= {"trainer.max_actor_ckpt_to_keep": 2, "trainer.max_critic_ckpt_to_keep": 2}
    settings["actor_rollout_ref.actor.optim.lr"] = 1e-4
    task, model = write_task(folder), write_model(folder)
    if algorithm == "ppo":
        settings["critic.model.path"] = model
    ledger = Ledger(algorithm=algorithm, engine="vllm" if vllm else "hf", steps=steps)
    arguments = overrides(task, model, out, **settings)
    whole = time.monotonic()
    finished(overrides(task, model, folder / "whole", **settings), log, forked=not vllm)
    step_s = statistics.median(line["timing_s/step"] for line in _lines(folder / "whole"))
    start_s = time.monotonic() - whole - steps * step_s
    before = shm_left_behind()
    run = started(arguments, log, forked=not vllm)
    try:
        while (
            status := _until(run, out, chance, start_s, step_s, stop=_enough(ledger, kills, began, minutes))
        ) is None:
            whom = ("rank 0", "rank 1", "driver")[ledger.kills % 3] if vllm else "driver"
            _kill(run, out, whom)
            ledger.of.append(whom)
            ledger.lost.append(max(0, (_lines(out)[-1]["step"] if _lines(out) else 0) - _saved(out)))
            if ledger.kills % 10 == 0:
                print(f"{algorithm}: {ledger.kills} kills, step {_saved(out)} of {steps}", file=sys.stderr, flush=True)
            if whom == "driver":
                while run.poll() is None:
                    time.sleep(0.01)
                run, ledger.starts = started(arguments, log, forked=not vllm), ledger.starts + 1
    finally:
        if run.poll() is None:
            os.kill(run.pid, signal.SIGKILL)
    assert status == 0, f"after {ledger.kills} kills: {log.read_text()[-3000:]}"
    ledger.steps_once = [line["step"] for line in _lines(out)] == list(range(1, steps + 1))
    pairs = zip(facts(folder / "whole"), facts(out), strict=True)
    ledger.different = sorted({name for a, b in pairs for name in a.keys() | b.keys() if a.get(name) != b.get(name)})
    unfinished = [path.name for path in out.iterdir() if path.name.endswith((".saving", ".old"))]
    ledger.left_behind = unfinished + sorted(shm_left_behind() - before)
    ledger.seconds = round(time.monotonic() - began, 1)
    return ledger


def _enough(ledger: Ledger, kills: int, began: float, minutes: float) -> bool:
    return ledger.kills >= kills or time.monotonic() - began > 60 * minutes


def _until(run: Process, out: Path, chance: random.Random, start_s: float, step_s: float, *, stop: bool) -> int | None:
    """Wait for the moment of the next kill: somewhere in the start, whose end is its first step (later starts take less
    than the first), or in the second step from here. The exit status where it ends before; stop: let it."""
    later = chance.choice((0, 1, 1, 1))
    wanted, heard = len(_lines(out)) + later, time.monotonic()
    while stop or len(_lines(out)) < wanted:
        if (status := run.poll()) is not None:
            return status
        if (out / "verl_like.log").exists() and time.time() - (out / "verl_like.log").stat().st_mtime < 1:
            heard = time.monotonic()
        assert time.monotonic() - heard < _SILENT_S, "the run is stuck"
        time.sleep(0.01)
    moment = time.monotonic() + chance.random() * (2 * step_s if later else start_s)
    while time.monotonic() < moment and (later or len(_lines(out)) <= wanted) and run.poll() is None:
        time.sleep(0.01)
    return run.poll()


def _kill(run: Process, out: Path, whom: str) -> None:
    if whom == "driver":
        os.kill(run.pid, signal.SIGKILL)
        return
    log = out / "workers" / f"worker_{whom.replace(' ', '')}.log"
    deadline = time.monotonic() + _SILENT_S
    while run.poll() is None and time.monotonic() < deadline:
        found = re.findall(r"=== rank \d of 2, run \w+, process (\d+)", log.read_text() if log.exists() else "")
        if found and "RayRank" in _command(found[-1]):
            os.kill(int(found[-1]), signal.SIGKILL)
            return
        time.sleep(0.05)  # it is not there yet, or no more


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _lines(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _saved(out: Path) -> int:
    marker = out / "latest_checkpointed_iteration.txt"
    return int(marker.read_text() or 0) if marker.exists() else 0


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), default="grpo")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--vllm", action="store_true", help="two ranks under Ray with vLLM")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no more are killed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked = {"vllm": given.vllm, "seed": given.seed, "minutes": given.minutes}
        ledger = killed_run(Path(folder), given.algorithm, given.kills, **asked)
    counted = {"kills": ledger.kills, "of": Counter(ledger.of), "lost": Counter(ledger.lost)}
    print(json.dumps(asdict(ledger) | counted))


if __name__ == "__main__":
    main()
