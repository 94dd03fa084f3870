"""What plants a fault into a run: the driver's half says when (a trainer class), a worker's half does it in the phase.

The variable FAULT holds {"phase", "what", "whom", "folder"}: rank 1 (in the phase "score" the reward function, in a run
of one process that one) sends the signal `what` to `whom`, or does what it says, once, in the third step; the time is
written into the folder.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from verl_like.trainer.ppo import PPOTrainer

STEP = 3
FAULT: dict[str, str] = json.loads(os.environ.get("FAULT", "{}"))
FOLDER = Path(FAULT.get("folder", "."))
GO, DONE = FOLDER / "go", FOLDER / "planted"


def act(phase: str) -> str:
    """Do it if it is time, and not done yet; what was done now, or ""."""
    if FAULT.get("phase") != phase or not GO.exists() or DONE.exists():
        return ""
    DONE.write_text(str(time.time()))
    what = FAULT["what"]
    if what == "hang":
        time.sleep(3600)
    elif what == "raises":
        raise RuntimeError("planted")
    elif what == "starts":
        time.sleep(60)  # until the other run has looked
    elif what == "folder removed":
        shutil.rmtree(FOLDER / "out")
    elif what == "folder read-only":
        subprocess.run(["mount", "--bind", *[str(FOLDER / "out")] * 2], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(FOLDER / "out")], check=True)
    elif what == "data gone":
        (FOLDER / "train.parquet").unlink()
    elif what.startswith("SIG"):
        for pid in targets():
            os.kill(pid, signal.Signals[what])
        time.sleep(0.5)  # it does not happen behind the phase's end
    return what


def targets() -> list[int]:
    """Process ids of whom it concerns."""
    if FAULT["whom"] == "grader":
        return [os.getpid()]
    if FAULT["whom"] in ("judge", "storage"):
        return [int((FOLDER / "server").read_text())]
    driver = int((FOLDER / "driver").read_text())
    if FAULT["whom"] in ("run", "between"):
        return [driver]
    logs = (FOLDER / "out" / "workers").glob("worker_rank*.log")
    ranks = {path.stem[-1]: int(re.findall(r"=== rank .* process (\d+)", path.read_text())[-1]) for path in logs}
    return {"driver": [driver], "rank": [ranks["1"]], "all": [*ranks.values(), driver]}[FAULT["whom"]]


class Planted(PPOTrainer):
    """Says when a phase of the step begins."""

    def begin_step(self) -> Any:
        """Rollout and scores."""
        if FAULT:
            (FOLDER / "driver").write_text(str(os.getpid()))
        self._go("rollout", "score")
        return super().begin_step()

    def evaluate(self, *arguments: Any) -> Any:
        """Old log-probs."""
        self._go("old log-probs")
        return super().evaluate(*arguments)

    def update_actor(self, *arguments: Any) -> Any:
        """The update."""
        self._go("update", "loss", "weights")
        return super().update_actor(*arguments)

    def save_if_due(self) -> None:
        """The checkpoint."""
        self._go("save")
        super().save_if_due()

    def sync_weights(self) -> Any:
        """The weight sync."""
        self._go("sync")
        return super().sync_weights()

    def validate(self) -> Any:
        """The validation."""
        self._go("validation")
        return super().validate()

    def _go(self, *phases: str) -> None:
        step = self.state.step + (phases[0] in ("rollout", "old log-probs", "update"))  # the others come after it
        if FAULT.get("phase") in phases and step == STEP:
            GO.touch()
            if FAULT["whom"] in ("judge", "storage", "second run"):
                act(FAULT["phase"])


def plant() -> None:
    """Wrap what each phase runs in a worker."""
    from verl_like.engine import state
    from verl_like.engine.fsdp import FSDPEngine
    from verl_like.rollout.step_loop import StepLoop
    from verl_like.weight_sync.receiver import WeightReceiver

    places: list[tuple[Any, str, tuple[str, ...]]] = [
        (StepLoop, "_carry_out", ("rollout", "validation")),
        (FSDPEngine, "forward", ("old log-probs",)),
        (FSDPEngine, "_backward", ("update",)),
        (state, "save_sharded", ("save",)),
        (WeightReceiver, "_load", ("sync",)),
    ]
    for owner, name, phases in places:
        setattr(owner, name, _wrapped(getattr(owner, name), phases))
    loss, update = FSDPEngine._loss, FSDPEngine.train_minibatch

    def overflown(self: Any, *arguments: Any, **options: Any) -> Any:
        found = update(self, *arguments, **options)
        if act("weights"):
            next(iter(self.model.parameters())).data.fill_(float("nan"))
        return found

    FSDPEngine.train_minibatch = overflown  # pyright: ignore

    def spoilt(self: Any, *arguments: Any) -> Any:
        value, metrics = loss(self, *arguments)
        return (value * float("nan") if act("loss") else value), metrics

    FSDPEngine._loss = spoilt  # pyright: ignore


def _wrapped(function: Any, phases: tuple[str, ...]) -> Any:
    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        for phase in phases:
            act(phase)
        return function(*arguments, **options)

    return run


if __name__ == "benchmarks.fault_plant" and (os.environ.get("RANK") == "1" or FAULT.get("whom") in ("run", "between")):
    plant()
