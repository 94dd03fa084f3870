"""PPO whose actor, reference and critic are split over two ranks: a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import main_ppo, metrics_of, overrides, write_task

pytestmark = pytest.mark.slow

SPLIT = {
    "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size": 2,  # the reference follows
    "critic.model.fsdp_config.tensor_parallel_size": 2,
}
RUN = {
    "trainer.launcher": "ray",
    "trainer.n_gpus_per_node": 2,
    "algorithm.adv_estimator": "gae",
    "critic.optim.lr": 3e-3,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.old_log_probs": "recompute",
}


def test_the_reward_rises(tmp_path: Path, tiny_model: Path) -> None:
    settings = RUN | SPLIT | {"trainer.total_training_steps": 12}
    result = main_ppo(overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **settings))
    assert result.returncode == 0, result.stdout
    assert "2 (1 data parallel)" in result.stdout
    records = metrics_of(tmp_path / "out")
    assert max(record["weight_sync/probe_gap"] for record in records) < 1e-5
    assert max(record["training/rollout_probs_diff_max"] for record in records) < 1e-4
    assert all(record["critic/grad_norm"] > 0 and record["actor/skipped_steps"] == 0 for record in records)
    assert abs(records[0]["actor/ppo_kl"]) < 1e-6 and abs(records[0]["actor/kl_loss"]) < 1e-6
    scores = [record["critic/score/mean"] for record in records]
    assert sum(scores[-4:]) / 4 > sum(scores[:4]) / 4 + 0.1


def test_split_weights_reach_vllm_and_a_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, tiny_model: Path
) -> None:
    task, whole, broken = write_task(tmp_path), tmp_path / "whole", tmp_path / "broken"
    settings = {
        "trainer.launcher": "ray",
        "trainer.n_gpus_per_node": 2,
        "trainer.save_freq": 2,
        "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size": 2,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.actor.optim.total_training_steps": 4,
    }
    for out, steps in ((whole, 4), (broken, 2), (broken, 4)):
        run = overrides(task, tiny_model, out, **settings, **{"trainer.total_training_steps": steps})
        result = main_ppo(run, timeout=400)
        assert result.returncode == 0, result.stdout
    assert "resuming from" in result.stdout
    records, resumed = metrics_of(whole), metrics_of(broken)
    assert len(records) == len(resumed) == 4
    assert max(record["weight_sync/probe_gap"] for record in records + resumed) < 1e-5
    for name in ("critic/score/mean", "actor/grad_norm", "actor/pg_loss"):
        assert [r[name] for r in resumed] == pytest.approx([r[name] for r in records], rel=1e-4, abs=1e-7), name
