"""Requests that live through several versions: do they survive the engine's sleep, and pauses for NCCL?"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from support import main_ppo, metrics_of, overrides, write_task

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

SETTINGS = {
    "trainer.launcher": "ray",
    "trainer.device": "cuda",
    "trainer.n_gpus_per_node": 1,
    "trainer.total_training_steps": 6,
    "algorithm.rollout_correction.rollout_is": "token",
    "data.max_response_length": 64,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
}


def records_of(folder: Path, model: Path, **settings: object) -> list[dict[str, float]]:
    result = main_ppo(overrides(write_task(folder), model, folder / "out", **SETTINGS, **settings), timeout=1100)
    assert result.returncode == 0, result.stdout[-4000:]
    assert "48 drawn = 48 trained" in result.stdout
    return metrics_of(folder / "out")


def test_what_runs_goes_on_after_the_engine_slept(tmp_path: Path, tiny_model: Path) -> None:
    """colocate_async on one device: weights and cache are freed while the policy trains, requests are kept."""
    records = records_of(tmp_path, tiny_model, **{"trainer.mode": "colocate_async"})
    assert len(records) == 6 and all(record["weight_sync/probe_gap_mean"] < 2e-2 for record in records)
    assert max(record["async/mixed_fraction"] for record in records) > 0
    print({name: records[-1][name] for name in ("staleness/mean", "async/reprefill_tokens", "timing_s/gen")})


def test_sampling_goes_on_on_a_device_of_its_own(tmp_path: Path, tiny_model: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"2 CUDA devices are needed, here are {torch.cuda.device_count()}")
    own = {"actor_rollout_ref.rollout.nnodes": 1, "actor_rollout_ref.rollout.n_gpus_per_node": 1}
    own |= {"trainer.mode": "separate_async", "actor_rollout_ref.hybrid_engine": False}
    records = records_of(tmp_path, tiny_model, **own)
    assert len(records) == 6 and all(record["weight_sync/probe_gap_mean"] < 2e-2 for record in records)
