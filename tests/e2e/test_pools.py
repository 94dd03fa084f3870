"""Roles in pools of their own: the same run as in one pool, and what is said when a pool fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.support import main_ppo, metrics_of, overrides, write_task

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
