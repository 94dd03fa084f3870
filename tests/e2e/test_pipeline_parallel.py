"""PPO whose actor, reference and critic are cut into two stages: a whole run on Ray is one rank's."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import main_ppo, metrics_of, overrides, write_task

pytestmark = pytest.mark.slow

STAGES = {
    "trainer.launcher": "ray",
    "trainer.n_gpus_per_node": 2,
    "actor_rollout_ref.actor.fsdp_config.pipeline_parallel_size": 2,  # the reference follows
    "critic.model.fsdp_config.pipeline_parallel_size": 2,
}
RUN = {
    "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.old_log_probs": "recompute",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.optim.eps": 1e-3,
    "critic.optim.eps": 1e-3,
    "data.max_prompt_length": 12,
    "data.max_response_length": 8,
    "trainer.total_training_steps": 2,
}


def test_a_run_in_two_stages_is_one_ranks(tmp_path: Path, tiny_model: Path) -> None:
    """Micro-batches of 24 tokens: a stage has several on the way."""
    budgets = {f"{role}.ppo_max_token_len_per_gpu": 24 for role in ("actor_rollout_ref.actor", "critic")}
    task, found = write_task(tmp_path), {}
    for name, more in (("one", {"trainer.launcher": "local"}), ("two", STAGES | budgets)):
        result = main_ppo(overrides(task, tiny_model, tmp_path / name, **(RUN | more)))
        assert result.returncode == 0, result.stdout
        found[name] = metrics_of(tmp_path / name)
    assert "2 (1 data parallel)" in result.stdout
    assert max(record["weight_sync/probe_gap"] for record in found["two"]) < 1e-5
    names = ("score/mean", "vf_loss", "grad_norm", "values/mean")
    for single, double in zip(found["one"], found["two"], strict=True):
        for name in (*(f"critic/{name}" for name in names), "actor/pg_loss", "actor/grad_norm", "actor/kl_loss"):
            assert double[name] == pytest.approx(single[name], rel=2e-4, abs=1e-6), name
