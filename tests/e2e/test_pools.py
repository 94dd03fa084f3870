"""Roles in pools of their own: the same run as in one pool, and what is said when a pool fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import ROOT, main_ppo, metrics_of, overrides, write_task
from verl_like.checkpoint.layout import find_latest, step_of

pytestmark = pytest.mark.engines

TIMES = ("timing", "perf/", "seconds", "throughput", "weight_sync/probe")

SETTINGS = {
    "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.actor.use_kl_loss": True,
    "critic.ppo_mini_batch_size": 8,
    "trainer.launcher": "ray",
    "trainer.total_training_steps": 3,
    "trainer.test_freq": 2,
    "trainer.save_freq": 2,
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": 1,
}


def run(folder: Path, model: Path, **settings: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    task = write_task(folder)
    done = main_ppo(overrides(task, model, folder / "out", **SETTINGS, **settings))
    assert done.returncode == 0, done.stdout[-4000:]
    return metrics_of(folder / "out")


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    """Metrics that differ, but for times."""
    assert len(one) == len(other) > 0
    return [
        f"step {step} {name}: {value} and {others.get(name)}"
        for step, (record, others) in enumerate(zip(one, other, strict=True), 1)
        for name, value in record.items()
        if not any(part in name for part in TIMES) and value != others.get(name)
    ]


def test_every_role_in_a_pool_of_its_own_trains_as_all_in_one(tmp_path: Path, tiny_model: Path) -> None:
    """Rollout engine, critic and reference each in processes of their own: not one number is another."""
    together = run(tmp_path / "one", tiny_model)
    placement = "{values:{roles:[critic]},frozen:{roles:[ref]}}"
    own = {"actor_rollout_ref.hybrid_engine": False, "actor_rollout_ref.rollout.nnodes": 1}
    own |= {"actor_rollout_ref.rollout.n_gpus_per_node": 1, "trainer.placement": placement}
    apart = run(tmp_path / "four", tiny_model, **own)
    assert same(together, apart) == []
    logs = {path.name for path in (tmp_path / "four" / "out" / "workers").iterdir()}
    assert logs == {"worker_rank0.log", "rollout_rank0.log", "values_rank0.log", "frozen_rank0.log"}


@pytest.mark.slow
def test_adapters_travel_alone_to_a_tensor_parallel_vllm(tmp_path: Path, tiny_model: Path) -> None:
    """Two ranks train, two others are one replica: base weights come once, then A and B of each adapted layer."""
    pytest.importorskip("vllm")
    settings = {
        "trainer.launcher": "ray",
        "trainer.n_gpus_per_node": 2,
        "trainer.total_training_steps": 8,
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 2,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "actor_rollout_ref.rollout.enforce_eager": True,
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.model.lora.merge": False,
        "actor_rollout_ref.actor.optim.lr": 2e-2,
    }
    done = main_ppo(overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **settings), timeout=400)
    assert done.returncode == 0, done.stdout[-4000:]
    records = metrics_of(tmp_path / "out")
    assert {record["weight_sync/num_tensors"] for record in records} == {28.0}  # 2 layers x 7 matrices, A and B
    early, late = (sum(record["critic/score/mean"] for record in part) / 2 for part in (records[:2], records[-2:]))
    assert late > 1.5 * early


@pytest.mark.parametrize(("pool", "saved"), [("rollout", True), pytest.param("worker", False, marks=pytest.mark.slow)])
def test_a_killed_pool_ends_the_run_by_its_name(tmp_path: Path, tiny_model: Path, pool: str, saved: bool) -> None:
    """What the trainer has learnt is saved when it was not the trainer that died."""
    out = tmp_path / "out"
    own = {"actor_rollout_ref.hybrid_engine": False, "actor_rollout_ref.rollout.nnodes": 1}
    own |= {"actor_rollout_ref.rollout.n_gpus_per_node": 1, "trainer.launcher": "ray"}
    command = overrides(write_task(tmp_path), tiny_model, out, **own, **{"trainer.total_training_steps": 10_000})
    run = subprocess.Popen(
        [sys.executable, "-m", "verl_like.trainer.main_ppo", *command],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 200
        while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < 3:
            assert run.poll() is None and time.monotonic() < deadline, run.communicate(timeout=60)[0][-4000:]
            time.sleep(0.1)
        log = (out / "workers" / f"{pool}_rank0.log").read_text()
        found = re.search(r"=== rank 0 of 1, run \w+, process (\d+)", log)
        assert found is not None
        os.kill(int(found[1]), signal.SIGKILL)
        text = run.communicate(timeout=120)[0]
    finally:
        run.kill()
    assert run.returncode != 0 and f"{pool} rank 0 of 1: its process died during" in text
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    checkpoint = find_latest(out)
    assert (checkpoint is not None) == saved
    if checkpoint is not None:
        assert step_of(checkpoint) == steps[-1] >= 3
