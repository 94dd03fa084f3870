"""What plants a fault into a run: the driver's half says when (a trainer class), a worker's half does it in the phase.

The variable FAULT holds {"phase", "what", "whom", "folder"}: rank 1 (in the phase "score" the reward function, in a run
of one process that one) sends the signal `what` to `whom`, or does what it says, once, in the third step; the time is
written into the folder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from verl_like.trainer.ppo import PPOTrainer

STEP = 3
FAULT: dict[str, str] = json.loads(os.environ.get("FAULT", "{}"))
FOLDER = Path(FAULT.get("folder", "."))
GO, DONE = FOLDER / "go", FOLDER / "planted"
_IN_DRIVER = ("credit", "samples", "metrics")


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
    elif what == "disk full":
        with contextlib.suppress(OSError), (FOLDER / "out" / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    elif what == "data gone":
        (FOLDER / "train.parquet").unlink()
    elif what.startswith("clock"):
        (FOLDER / "clock").write_bytes(struct.pack("l", 86400 * (-1 if "back" in what else 1)))
    elif what == "out of memory" and phase == "credit":
        bytearray(2**50)
    elif what == "out of memory":
        torch.empty(2**50, dtype=torch.uint8)
    elif what in ("slow", "wrong"):
        (FOLDER / "mode").write_text(what)
    elif what == "leaks":
        held = []
        while True:
            held.append(bytes(2**26))  # the address space is what is limited; no page of it is touched
    elif what == "floods":
        for _ in range(200):
            print("no end of it, " * 2**16)
    elif what.startswith("SIG"):
        for pid in targets():
            os.kill(pid, signal.Signals[what.partition(",")[0]])
        time.sleep(0.5)  # it does not happen behind the phase's end
    return what


def targets() -> list[int]:
    """Process ids of whom it concerns."""
    whom = FAULT["whom"]
    if whom == "grader":
        return [os.getpid()]
    if whom in ("judge", "storage", "tracker"):
        return [int((FOLDER / "server").read_text())]
    driver = int((FOLDER / "driver").read_text())
    if whom in ("run", "between"):
        return [driver]
    if whom == "raylet":
        return [os.getppid()]
    if whom == "node":  # Ray's daemon, and all that it has started: this process last
        return [*sorted(below(os.getppid()), key=lambda pid: pid == os.getpid())]
    if whom == "GCS":
        return [pid for pid in below(driver) if Path(f"/proc/{pid}/comm").read_text().startswith("gcs_server")]
    logs = (FOLDER / "out" / "workers").glob("worker_rank*.log")
    ranks = {path.stem[-1]: int(re.findall(r"=== rank .* process (\d+)", path.read_text())[-1]) for path in logs}
    return {"driver": [driver], "rank": [ranks["1"]], "all": [*ranks.values(), driver]}[whom]


def below(pid: int) -> list[int]:
    """A process and its children's children."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [pid, *(other for child in children.split() for other in below(int(child)))]


class Posts:
    """A tracker of one's own that sends each step to a service, and waits for its answer as long as it takes."""

    def __init__(self, config: Any, folder: Path, resumed_at: int | None) -> None: ...

    def log(self, step: int, metrics: Any) -> None:
        """One request."""
        urllib.request.urlopen(os.environ["POSTS_TO"], json.dumps({"step": step, **metrics}).encode()).close()


class Planted(PPOTrainer):
    """Says when a phase of the step begins."""

    def begin_step(self) -> Any:
        """Rollout and scores."""
        if FAULT:
            (FOLDER / "driver").write_text(str(os.getpid()))
        self._go("rollout", "score")
        return super().begin_step()

    def make_experience(self, *arguments: Any) -> Any:
        """Advantages, in the driver."""
        self._go("credit")
        return super().make_experience(*arguments)

    def keep_samples(self, *arguments: Any) -> None:
        """Files of samples."""
        self._go("samples")
        super().keep_samples(*arguments)

    def report_step(self) -> Any:
        """The metrics."""
        self._go("metrics")
        return super().report_step()

    def evaluate(self, *arguments: Any) -> Any:
        """Old log-probs."""
        self._go("old log-probs")
        return super().evaluate(*arguments)

    def update_actor(self, *arguments: Any) -> Any:
        """The update."""
        self._go("update", "loss", "weights", "forward", "backward", "optimizer")
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
        step = self.state.step + (phases[0] not in ("save", "sync", "validation", "metrics"))  # these come after it
        if FAULT.get("phase") in phases and step == STEP:
            GO.touch()
            if FAULT["whom"] in ("judge", "storage", "tracker", "second run") or phases[0] in _IN_DRIVER:
                act(FAULT["phase"])


def plant() -> None:
    """Wrap what each phase runs in a worker."""
    from verl_like.engine import state
    from verl_like.engine.fsdp import FSDPEngine
    from verl_like.rollout.hf import HFRolloutEngine
    from verl_like.rollout.rows import Row
    from verl_like.rollout.step_loop import StepLoop
    from verl_like.weight_sync.receiver import WeightReceiver

    inside = FAULT["what"] == "out of memory"  # where the engine sees it
    places: list[tuple[Any, str, str]] = [
        (HFRolloutEngine, "_forward", "rollout") if inside else (StepLoop, "_carry_out", "rollout"),
        (StepLoop, "_carry_out", "validation"),
        (FSDPEngine, "forward", "old log-probs"),
        (FSDPEngine, "_backward", "update"),
        (FSDPEngine, "_answers", "forward"),
        (state, "save_sharded", "save"),
        (WeightReceiver, "_load", "sync"),
    ]
    if FAULT["what"] not in ("garbage", "nan"):
        for owner, name, phase in places:
            setattr(owner, name, _wrapped(getattr(owner, name), phase))

    def overflown(self: Any, found: Any) -> Any:
        if act("weights"):
            next(iter(self.model.parameters())).data.fill_(float("nan"))
        return found

    def spoilt_loss(self: Any, found: Any) -> Any:
        value, metrics = found
        if FAULT["phase"] == "backward" and value.requires_grad:
            value.register_hook(_then("backward"))
        return (value * float("nan") if act("loss") else value), metrics

    def spoilt_pass(self: Any, found: Any) -> Any:
        return {name: values * float("nan") for name, values in found.items()} if act("old log-probs") else found

    def spoilt_answer(self: Any, found: Any) -> Any:
        what, sampled = act("rollout"), found.sampled
        if what == "nan":
            sampled = replace(sampled, log_probs=sampled.log_probs * float("nan"))
        elif what == "garbage":
            sampled = replace(sampled, token_ids=sampled.token_ids + 1_000_000)
        return replace(found, sampled=sampled)

    def hooked(self: Any, found: Any) -> Any:
        found.register_step_pre_hook(_then("optimizer"))
        return found

    _changed(FSDPEngine, "train_minibatch", overflown)
    _changed(FSDPEngine, "_loss", spoilt_loss)
    if FAULT["phase"] == "optimizer":
        _changed(FSDPEngine, "_build_optimizer", hooked)
    if FAULT["what"] in ("garbage", "nan"):
        _changed(FSDPEngine, "forward", spoilt_pass)
        _changed(Row, "completion", spoilt_answer)


def _changed(owner: Any, name: str, change: Callable[[Any, Any], Any]) -> None:
    """The method gives what `change` makes of its result."""
    function = getattr(owner, name)
    setattr(owner, name, lambda self, *arguments, **options: change(self, function(self, *arguments, **options)))


def _then(phase: str) -> Callable[..., None]:
    def hook(*arguments: Any) -> None:
        act(phase)

    return hook


def _wrapped(function: Any, phase: str) -> Any:
    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        act(phase)
        return function(*arguments, **options)

    return run


PLANTS = bool(FAULT) and (os.environ.get("RANK") == "1" or FAULT["whom"] in ("run", "between"))
if __name__ == "benchmarks.fault_plant" and PLANTS:
    plant()
