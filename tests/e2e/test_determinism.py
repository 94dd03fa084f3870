"""trainer.full_determinism: two runs agree in every metric but clock and memory readings, to the last digit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import MEASURED, metrics_of, overrides, write_task

from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.ppo_mini_batch_size": 4},
    "ppo": {"algorithm.adv_estimator": "gae", "critic.ppo_mini_batch_size": 4, "critic.optim.lr": 3e-3},
    "lora": {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.actor.optim.lr": 2e-2},
}
NOISY = """
import numpy as np
from verl_like.algorithms.losses.base import TokenLoss
from verl_like.algorithms.losses.clipped import vanilla


def noisy(batch, actor):
    found = vanilla(batch, actor)
    return TokenLoss(loss_BR=found.loss_BR * (1 + np.random.rand()), metrics_BR=found.metrics_BR)
"""


def metrics(out: Path) -> list[dict[str, float]]:
    """What two equal runs must have in common."""
    records = [
        {name: value for name, value in record.items() if not name.startswith(MEASURED)} for record in metrics_of(out)
    ]
    assert len(records) >= 2 and all(len(record) > 60 for record in records[-2:])
    return records


def two_runs(folder: Path, model: Path, settings: dict[str, Any]) -> list[list[dict[str, float]]]:
    """Their metrics; the second one finds the global generators elsewhere."""
    task, steps = write_task(folder), {"trainer.total_training_steps": 3, "trainer.test_freq": 3}
    for number in range(2):
        torch.manual_seed(number)
        train(compose(overrides(task, model, folder / f"{number}", **steps, **settings)))
    return [metrics(folder / f"{number}") for number in range(2)]


@pytest.mark.parametrize("name", VARIANTS)
def test_two_runs_have_equal_metrics(name: str, tmp_path: Path, tiny_model: Path) -> None:
    first, second = two_runs(tmp_path, tiny_model, {**VARIANTS[name], "trainer.full_determinism": True})
    assert first == second and "val-core/sevens/acc/mean@1" in first[-1]
    assert re.search(r"\n  determinism +full: ", (tmp_path / "0" / "verl_like.log").read_text())
    assert not torch.are_deterministic_algorithms_enabled()  # the next run in this process chooses for itself


@pytest.mark.parametrize("full", [True, False])
def test_own_code_that_draws_random_numbers(full: bool, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "own.py").write_text(NOISY)
    own = {"actor_rollout_ref.actor.policy_loss.loss_mode": f"{tmp_path}/own.py:noisy"}
    first, second = two_runs(tmp_path, tiny_model, {**own, "trainer.full_determinism": full})
    assert (first == second) == full
