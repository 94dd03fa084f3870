"""Every axis of the mesh, and each beside FSDP, in an asynchronous run whose engine has a pool of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import main_ppo, metrics_of, overrides, write_task
from test_expert_parallel import mixture

from verl_like.kit.replaying import replay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("ranks", [2, 4])  # four: FSDP shards what the axis leaves over two
@pytest.mark.parametrize("axis", ["expert", "context", "tensor", "pipeline"])
def test_an_asynchronous_run_on_any_mesh_is_made_again_by_one_rank(
    tmp_path: Path, tiny_model: Path, axis: str, ranks: int
) -> None:
    """Weights go to one replica (ipc) or two (broadcast), and are proved; a recorded step replays in one process."""
    replicas, model = ranks // 2, mixture(tmp_path, tiny_model) if axis == "expert" else tiny_model
    settings = {
        "trainer.mode": "separate_async",
        "trainer.launcher": "ray",
        "trainer.n_gpus_per_node": ranks,
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 1,
        "trainer.record_freq": 1,
        f"actor_rollout_ref.actor.fsdp_config.{axis}_parallel_size": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 64,
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": replicas,
        "algorithm.rollout_correction.rollout_is": "token",
        "async_training.max_staleness": 1,
    }
    out = tmp_path / "out"
    done = main_ppo(overrides(write_task(tmp_path), model, out, **settings), timeout=500)
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{ranks} ({ranks if axis == 'expert' else ranks // 2} data parallel)" in done.stdout
    records = metrics_of(out)
    assert [record["training/global_step"] for record in records] == [1, 2]
    assert max(record["weight_sync/probe_gap"] for record in records) < 1e-4
    found = replay(out, 2, [], 1e-4)
    assert all(each.same for each in found), [each for each in found if not each.same]
    assert {"actor/grad_norm", "actor/pg_loss"} <= {each.where for each in found}
