"""Number of ranks of a proof: as many as the mesh of every role needs."""

from __future__ import annotations

import pytest

from verl_like.config.pools import named_pools
from verl_like.kit.selfcheck.real_step import small
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


def test_critic_and_reference_keep_their_pools_in_a_proof() -> None:
    """Pools of what is left out are too; none has more ranks than the proof. Rows are as many as each pool cuts."""
    placement = "{values:{roles:[critic],nnodes:2,n_gpus_per_node:4},ref:3,rollout:2}"
    keys = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True", "trainer.n_gpus_per_node=4"]
    config = small(compose([*OF_RUN, *keys, f"trainer.placement={placement}"]), 4, "")
    sizes = {pool.name: (pool.roles, pool.world_size) for pool in named_pools(config.trainer.placement)}
    assert sizes == {"values": (("critic",), 4), "ref": (("ref",), 3)}
    assert config.trainer.launcher == "ray" and config.data.train_batch_size % 12 == 0
    assert small(compose([*OF_RUN, *keys[:1]]), 1, "").trainer.launcher == "local"


def test_a_mesh_that_no_number_of_ranks_has_is_refused() -> None:
    """A run on two ranks has one copy, of both; on more, copies are of three, which pairs do not divide."""
    keys = [f"{FSDP}.fsdp_size=3", f"{FSDP}.tensor_parallel_size=2", "trainer.n_gpus_per_node=2"]
    config = compose([*OF_RUN, "algorithm.adv_estimator=grpo", *keys])
    assert ranks_of_proof(config, 2) == 2
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2 does not divide (?s:.*) ranks from 4 on .*--ranks"):
        ranks_of_proof(config, 3)
