"""vLLM on a GPU of its own: do the weights arrive by NCCL, proved, and is the critic at home on a third device?"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from support import main_ppo, metrics_of, overrides, write_task

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("critic_apart", [False, True])
def test_the_rollout_engine_on_a_device_of_its_own(tmp_path: Path, tiny_model: Path, critic_apart: bool) -> None:
    """The tiny model: what is asked is whether it works, not how fast."""
    needed = 2 + critic_apart
    if torch.cuda.device_count() < needed:
        pytest.skip(f"{needed} CUDA devices are needed, here are {torch.cuda.device_count()}")
    settings = {
        "trainer.launcher": "ray",
        "trainer.device": "cuda",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 3,
        "actor_rollout_ref.hybrid_engine": False,
        "actor_rollout_ref.rollout.nnodes": 1,
        "actor_rollout_ref.rollout.n_gpus_per_node": 1,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
    }
    if critic_apart:
        settings |= {"algorithm.adv_estimator": "gae", "critic.ppo_mini_batch_size": 8}
        settings["trainer.placement"] = "{values:{roles:[critic]}}"
    result = main_ppo(overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **settings), timeout=1100)
    assert result.returncode == 0, result.stdout[-4000:]
    records = metrics_of(tmp_path / "out")
    assert len(records) == 3 and all(record["weight_sync/probe_gap_mean"] < 2e-2 for record in records)
