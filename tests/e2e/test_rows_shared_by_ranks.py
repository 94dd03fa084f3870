"""PPO whose actor, reference and critic have every row on two ranks: a whole run on Ray is one rank's."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import main_ppo, metrics_of, overrides, write_task

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ("context_parallel_size", 10),  # below every row of more: both ranks together have room for the longest
        ("pipeline_parallel_size", 24),  # a stage has several micro-batches on the way
    ],
)
def test_a_run_on_two_ranks_is_one_ranks(tmp_path: Path, tiny_model: Path, size: str, tokens: int) -> None:
    """tokens: budget of a rank."""
    two = {f"{role}.ppo_max_token_len_per_gpu": tokens for role in ("actor_rollout_ref.actor", "critic")}
    two |= {f"{section}.fsdp_config.{size}": 2 for section in ("actor_rollout_ref.actor", "critic.model")}  # and of ref
    task, found = write_task(tmp_path), {}
    for name, more in (("one", {"trainer.launcher": "local"}), ("two", {"trainer.n_gpus_per_node": 2} | two)):
        run = {"trainer.launcher": "ray"} | RUN | more
        result = main_ppo(overrides(task, tiny_model, tmp_path / name, **run))
        assert result.returncode == 0, result.stdout
        found[name] = metrics_of(tmp_path / name)
    assert "2 (1 data parallel)" in result.stdout and "longer sequence" not in result.stdout
    assert max(record["weight_sync/probe_gap"] for record in found["two"]) < 1e-5
    names = ("score/mean", "vf_loss", "grad_norm", "values/mean")
    for single, double in zip(found["one"], found["two"], strict=True):
        for name in (*(f"critic/{name}" for name in names), "actor/pg_loss", "actor/grad_norm", "actor/kl_loss"):
            assert double[name] == pytest.approx(single[name], rel=2e-4, abs=1e-6), name
