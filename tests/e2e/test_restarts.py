"""A run whose workers are killed goes on by itself, to the numbers of one that nothing happened to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.support import ROOT, main_ppo, metrics_of, overrides, write_task

pytestmark = pytest.mark.engines

TIMES = ("timing", "perf/", "seconds", "throughput", "weight_sync/probe", "weight_sync/num_changed")


def lines(out: Path) -> list[dict[str, float]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


CRITIC = {  # in a pool of its own, and nearly always in its update
    "algorithm.adv_estimator": "gae",
    "critic.ppo_mini_batch_size": 8,
    "critic.ppo_epochs": 12,
    "trainer.placement": "{values:{roles:[critic]}}",
    "trainer.max_critic_ckpt_to_keep": 2,
}


@pytest.mark.parametrize(("pool", "more"), [("worker", {}), ("values", CRITIC)])
def test_a_killed_worker_costs_the_step_it_was_in(
    tmp_path: Path, tiny_model: Path, pool: str, more: dict[str, object]
) -> None:
    task, out = write_task(tmp_path), tmp_path / "out"
    settings = {
        **more,
        "trainer.launcher": "ray",
        "trainer.save_freq": 1,
        "trainer.total_training_steps": 40,
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.max_restarts": 1,
        "trainer.restart_delay": 1,
    }
    run = subprocess.Popen(
        [sys.executable, "-m", "verl_like.trainer.main_ppo", *overrides(task, tiny_model, out, **settings)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 200
        while len(lines(out)) < 4:
            assert run.poll() is None and time.monotonic() < deadline, run.communicate(timeout=60)[0][-4000:]
            time.sleep(0.05)
        found = re.search(
            r"=== rank 0 of 1, run \w+, process (\d+)", (out / "workers" / f"{pool}_rank0.log").read_text()
        )
        assert found is not None
        os.kill(int(found[1]), signal.SIGKILL)
        text = run.communicate(timeout=200)[0]
    finally:
        run.kill()
    assert run.returncode == 0, text[-4000:]
    assert f"{pool} rank 0 of 1: its process died during" in text and "restart 1 of 1: trainer.max_restarts" in text
    assert [line["step"] for line in lines(out)] == list(range(1, 41))
    undisturbed = tmp_path / "undisturbed"
    done = main_ppo(overrides(task, tiny_model, undisturbed, **settings))
    assert done.returncode == 0, done.stdout[-4000:]
    different = {
        name
        for one, other in zip(metrics_of(out), metrics_of(undisturbed), strict=True)
        for name, value in one.items()
        if not any(part in name for part in TIMES) and value != other.get(name)
    }
    assert different == set()
