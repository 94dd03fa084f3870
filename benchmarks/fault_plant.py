"""What plants a fault into a run: the driver's half says when (a trainer class), a worker's half does it in the phase.

The variable FAULT holds {"phase", "what", "whom", "folder"}: rank 1 (in the phase "score" the reward function) sends
the signal `what` to `whom`, or does what it says, once, in the third step; the time is written into the folder.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from verl_like.trainer.ppo import PPOTrainer

STEP = 3
FAULT: dict[str, str] = json.loads(os.environ.get("FAULT", "{}"))
FOLDER = Path(FAULT.get("folder", "."))
GO, DONE = FOLDER / "go", FOLDER / "planted"


def act(phase: str) -> bool:
    """Do it if it is time, and not done yet; whether it was done now. Called in rank 1."""
    if FAULT.get("phase") != phase or not GO.exists() or DONE.exists():
        return False
    DONE.write_text(str(time.time()))
    what = FAULT["what"]
    if what == "hang":
        time.sleep(3600)
    elif what.startswith("SIG"):
        for pid in targets():
            os.kill(pid, signal.Signals[what])
        time.sleep(0.5)  # it does not happen behind the phase's end
    return True


def targets() -> list[int]:
    """Process ids of whom it concerns."""
    driver = int((FOLDER / "driver").read_text())
    logs = (FOLDER / "out" / "workers").glob("worker_rank*.log")
    ranks = {path.stem[-1]: int(re.findall(r"=== rank .* process (\d+)", path.read_text())[-1]) for path in logs}
    return {"driver": [driver], "rank": [ranks["1"]], "all": [*ranks.values(), driver]}[FAULT["whom"]]


class Planted(PPOTrainer):
    """Says when a phase of the step begins."""

    def begin_step(self) -> Any:
        """Rollout and scores."""
        (FOLDER / "driver").write_text(str(os.getpid()))
        self._go("rollout", "score")
        return super().begin_step()

    def evaluate(self, *arguments: Any) -> Any:
        """Old log-probs."""
        self._go("old log-probs")
        return super().evaluate(*arguments)

    def update_actor(self, *arguments: Any) -> Any:
        """The update."""
        self._go("update", "loss")
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
    loss = FSDPEngine._loss

    def spoilt(self: Any, *arguments: Any) -> Any:
        value, metrics = loss(self, *arguments)
        return (value * float("nan") if act("loss") else value), metrics

    FSDPEngine._loss = spoilt


def _wrapped(function: Any, phases: tuple[str, ...]) -> Any:
    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        for phase in phases:
            act(phase)
        return function(*arguments, **options)

    return run


if FAULT and os.environ.get("RANK") == "1":
    plant()
