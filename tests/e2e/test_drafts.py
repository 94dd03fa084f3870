"""Runs with rollout.speculative.method=history learn what runs without it do; a resumed one knows earlier responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.support import MEASURED, metrics_of, overrides, write_task
from verl_like.plugins.drafts.history import FILE
from verl_like.trainer.compose import compose
from verl_like.trainer.main_ppo import train

ON = {"actor_rollout_ref.rollout.speculative.method": "history"}


def test_a_run_learns_the_same_and_a_resumed_one_remembers(tmp_path: Path, tiny_model: Path) -> None:
    task = write_task(tmp_path, num_rows=8)
    every: dict[str, Any] = {
        "data.train_batch_size": 4,
        "data.max_response_length": 24,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.rollout.temperature": 0.05,  # as sure as a trained policy
        "actor_rollout_ref.actor.optim.lr": 1e-5,
        "trainer.save_freq": 2,
    }

    def run(name: str, steps: int, **keys: Any) -> list[dict[str, Any]]:
        train(
            compose(
                overrides(task, tiny_model, tmp_path / name, **{**every, **keys, "trainer.total_training_steps": steps})
            )
        )
        return metrics_of(tmp_path / name)

    def learned(records: list[dict[str, Any]]) -> list[dict[str, float]]:
        left = (*MEASURED, "drafts/")
        return [{k: v for k, v in record.items() if not k.startswith(left)} for record in records]

    plain, guessed = run("plain", 4), run("guessed", 4, **ON)
    for one, other in zip(learned(guessed), learned(plain), strict=True):
        assert one.keys() == other.keys()
        assert {k: v for k, v in one.items() if isinstance(v, float)} == pytest.approx(
            {k: v for k, v in other.items() if isinstance(v, float)}, rel=1e-3, abs=1e-4
        )
    assert not any(name.startswith("drafts/") for record in plain for name in record)
    first, last = guessed[0], guessed[-1]
    assert last["drafts/history_mb"] > first["drafts/history_mb"] > 0
    assert last["drafts/kept_share"] > 0.5 and last["drafts/tokens_a_pass"] > 1.5

    run("cut", 2, **ON)
    with np.load(next((tmp_path / "cut").rglob(FILE))) as columns:
        assert set(columns["index_B"].tolist()) == set(range(8))
    resumed = run("cut", 4, **ON)
    assert resumed[-1]["drafts/history_mb"] == last["drafts/history_mb"]
    assert learned(resumed)[-1].keys() == learned(guessed)[-1].keys()
