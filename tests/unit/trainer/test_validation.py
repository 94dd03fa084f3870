"""Validation over several batches: a failed reward is counted, and only the failure of all ends the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.data.factory import CharTokenizer, write_prompts
from tests.unit.episodes.fleet import Verdict, collector, dataset
from verl_like.batch import Rollouts, Scores
from verl_like.config import DataConfig
from verl_like.data.dataset import PromptDataset
from verl_like.data.loader import iterate_all
from verl_like.episodes.answering import Answering
from verl_like.episodes.episode import SingleTurn
from verl_like.rewards.grading import RewardError
from verl_like.rollout.rollout_engine import SamplingParams
from verl_like.trainer.ppo import PPOTrainer
from verl_like.trainer.validation import Validator


def validate(
    folder: Path, verdict: Verdict, *, count: int = 3, n: int = 1
) -> tuple[dict[str, float], list[tuple[Rollouts, Scores]]]:
    """Batches of two prompts."""
    files = write_prompts(folder / "val.parquet", ["x"] * max(count, 1))
    data = PromptDataset(DataConfig(), files, CharTokenizer(template=False), split="val")
    how = Answering(runner=SingleTurn(), sampling=SamplingParams(max_tokens=4), n=n, seed=1, purpose="val")
    seen: list[tuple[Rollouts, Scores]] = []
    batches = list(iterate_all(data, 2)) if count else []
    validator = Validator(lambda: batches, how, on_samples=lambda step, answered: seen.extend(answered))
    with collector(dataset(folder), verdict=verdict) as (made, _):
        return validator.run(made, 3), seen


def test_a_last_batch_whose_only_reward_fails_does_not_end_the_run(tmp_path: Path) -> None:
    metrics, _ = validate(tmp_path, lambda position, nth: None if position == 2 else float(position))
    assert metrics["val-core/arithmetic/reward/mean@1"] == 0.5
    assert metrics["val-aux/arithmetic/failed_rewards"] == 1


def test_when_every_reward_fails_the_run_ends_with_the_first_failure(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"(?s)step 3.*every response \(3\) failed \(3 x timeout\).*too slow"):
        validate(tmp_path, lambda position, nth: None)


def test_all_samples_of_all_batches_are_shown_in_order(tmp_path: Path) -> None:
    metrics, seen = validate(tmp_path, lambda position, nth: float(nth), n=2)
    assert [row.index for rollouts, _ in seen for row in rollouts.rows] == [0, 0, 1, 1, 2, 2]
    assert metrics["val-core/arithmetic/reward/best@2/mean"] == 1.0


def test_no_validation_set_gives_no_metrics(tmp_path: Path) -> None:
    assert validate(tmp_path, lambda position, nth: 1.0, count=0) == ({}, [])


@pytest.mark.parametrize("metrics", [{}, {"val-core/a/acc/mean@1": 0.5}])
def test_a_validation_before_training_without_a_set_reports_no_step(metrics: dict[str, float]) -> None:
    told: list[tuple[int, dict[str, float]]] = []
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(trainer=SimpleNamespace(val_before_train=True, val_only=False)),
        state=SimpleNamespace(step=0),
        validate=lambda: metrics,
        report=SimpleNamespace(validation=lambda step, values: told.append((step, values))),
        checkpoints=SimpleNamespace(validated=lambda run, values: None),
    )
    PPOTrainer.validate_before_training(trainer)
    assert told == ([(0, metrics)] if metrics else [])
