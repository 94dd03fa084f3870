"""Runs that sample with SGLang: the numbers of hf's, whatever happens to the engine's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import ROOT, main_ppo, metrics_of, overrides, write_task

pytestmark = [pytest.mark.engines, pytest.mark.sglang]

SAME = ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "response_length/mean")
RUN: dict[str, Any] = {"trainer.max_restarts": 1, "trainer.restart_delay": 1, "trainer.save_freq": 1}


def numbers(out: Path) -> list[list[float]]:
    return [[step[name] for name in SAME] for step in metrics_of(out)]


def children(pid: int) -> list[int]:
    """Processes that this one started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_of(pid: int) -> int:
    """The process of the engine of a run without Ray: of its children the one with SGLang's library."""
    (found,) = [child for child in children(pid) if "sglang" in Path(f"/proc/{child}/maps").read_text()]
    return found


def test_a_run_has_the_numbers_of_hf_though_its_engine_is_killed(tmp_path: Path, tiny_model: Path) -> None:
    """Both engines draw a token from the same number; the killed one's step is repeated from the checkpoint before."""
    task, out, other = write_task(tmp_path), tmp_path / "out", tmp_path / "hf"
    arguments = overrides(task, tiny_model, out, actor_rollout_ref__rollout__name="sglang", **RUN)
    log = tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen(
            [sys.executable, "-m", "verl_like.trainer.main_ppo", *arguments], cwd=ROOT, stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + 200
        while not list(out.glob("global_step_1/*")):
            assert run.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.02)
        os.kill(engine_of(run.pid), signal.SIGKILL)
        assert run.wait(200) == 0, log.read_text()[-4000:]
    finally:
        run.kill()
    said = log.read_text()  # it was sampling; or between two steps, when the next sync finds it gone
    assert "restart 1 of 1: trainer.max_restarts" in said or "the rollout engine's process is started anew" in said
    done = main_ppo(overrides(task, tiny_model, other, **RUN))
    assert done.returncode == 0, done.stdout[-4000:]
    for mine, hfs in zip(numbers(out), numbers(other), strict=True):
        assert mine == pytest.approx(hfs, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_tensor_parallel_pool_of_its_own_with_merged_adapters(tmp_path: Path, tiny_model: Path) -> None:
    """One rank trains with LoRA, two others are one replica: weights come by broadcast, and go on to two engines."""
    task, out, other = write_task(tmp_path), tmp_path / "out", tmp_path / "hf"
    lora = {"actor_rollout_ref.model.lora_rank": 8, "trainer.total_training_steps": 2}
    pool = {
        "trainer.launcher": "ray",
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 2,
        "actor_rollout_ref.rollout.name": "sglang",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    }
    for folder, settings in ((out, lora | pool), (other, lora)):
        done = main_ppo(overrides(task, tiny_model, folder, **settings), timeout=400)
        assert done.returncode == 0, done.stdout[-4000:]
    for mine, hfs in zip(numbers(out), numbers(other), strict=True):
        assert mine == pytest.approx(hfs, rel=1e-3, abs=1e-5)
