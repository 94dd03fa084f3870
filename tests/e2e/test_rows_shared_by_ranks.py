"""PPO whose actor, reference and critic have every row on several ranks: a whole run on Ray is one rank's."""

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
    ("axes", "ranks", "tokens"),
    [
        (["context"], 2, 10),  # below every row of more: both ranks together have room for the longest
        (["pipeline"], 2, 24),  # a stage has several micro-batches on the way
        (["pipeline"], 4, 24),  # FSDP shards each stage over two
        (["pipeline", "context"], 4, 12),
        (["context"], 4, 10),
        (["tensor"], 4, 24),
    ],
)
def test_a_run_on_several_ranks_is_one_ranks(
    tmp_path: Path, tiny_model: Path, axes: list[str], ranks: int, tokens: int
) -> None:
    """axes: of two ranks each. tokens: budget of a rank."""
    many = {f"{role}.ppo_max_token_len_per_gpu": tokens for role in ("actor_rollout_ref.actor", "critic")}
    for section in ("actor_rollout_ref.actor", "critic.model"):  # and of ref
        many |= {f"{section}.fsdp_config.{axis}_parallel_size": 2 for axis in axes}
    task, found = write_task(tmp_path), {}
    for name, more in (("one", {"trainer.launcher": "local"}), ("many", {"trainer.n_gpus_per_node": ranks} | many)):
        run = {"trainer.launcher": "ray"} | RUN | more
        result = main_ppo(overrides(task, tiny_model, tmp_path / name, **run))
        assert result.returncode == 0, result.stdout
        found[name] = metrics_of(tmp_path / name)
    sizes = f"{ranks} ({ranks // 2 ** len(axes)} data parallel)"
    assert sizes in result.stdout and "longer sequence" not in result.stdout
    assert max(record["weight_sync/probe_gap"] for record in found["many"]) < 1e-5
    names = ("score/mean", "vf_loss", "grad_norm", "values/mean")
    for single, several in zip(found["one"], found["many"], strict=True):
        for name in (*(f"critic/{name}" for name in names), "actor/pg_loss", "actor/grad_norm", "actor/kl_loss"):
            assert several[name] == pytest.approx(single[name], rel=2e-4, abs=1e-6), name
