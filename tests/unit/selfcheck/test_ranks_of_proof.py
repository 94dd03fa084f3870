"""Number of ranks of a proof: as many as the mesh of every role needs."""

from __future__ import annotations

import pytest

from verl_like.kit.selfcheck.step_proof import ranks_of_proof
from verl_like.trainer.compose import compose

FSDP, OF_RUN = "actor_rollout_ref.actor.fsdp_config", ["data.train_files=x.parquet"]


@pytest.mark.parametrize(
    ("keys", "asked", "needed"),
    [
        ([f"{FSDP}.fsdp_size=4", f"{FSDP}.pipeline_parallel_size=2"], 1, 2),  # fewer than a copy has: all hold one
        ([f"{FSDP}.fsdp_size=4", f"{FSDP}.pipeline_parallel_size=2"], 6, 8),
        ([f"{FSDP}.fsdp_size=4", "critic.model.fsdp_config.fsdp_size=6"], 5, 12),
        ([f"{FSDP}.fsdp_size=2", f"{FSDP}.tensor_parallel_size=2"], 3, 4),
    ],
)
def test_a_proof_has_ranks_for_every_mesh(keys: list[str], asked: int, needed: int) -> None:
    of_run = [*OF_RUN, "algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=24"]
    assert ranks_of_proof(compose([*of_run, *keys]), asked) == needed


def test_a_mesh_that_no_number_of_ranks_has_is_refused() -> None:
    """A run on two ranks has one copy, of both; on more, copies are of three, which pairs do not divide."""
    keys = [f"{FSDP}.fsdp_size=3", f"{FSDP}.tensor_parallel_size=2", "trainer.n_gpus_per_node=2"]
    config = compose([*OF_RUN, "algorithm.adv_estimator=grpo", *keys])
    assert ranks_of_proof(config, 2) == 2
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2 does not divide (?s:.*) ranks from 4 on .*--ranks"):
        ranks_of_proof(config, 3)
