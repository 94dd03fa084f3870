"""Validation over several batches: a failed reward is counted, and only the failure of all ends the run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.rewards.factory import make_rollouts
from verl_like.batch import Rollouts, Scores
from verl_like.rewards.manager import RewardError, require_any, to_scores
from verl_like.rewards.protocol import RewardOutcome
from verl_like.rollout.protocol import SamplingParams
from verl_like.trainer.validation import Validator


class Policy:
    """Answers each batch with the batch itself."""

    def generate(self, prompts: Rollouts, sampling: SamplingParams, **kwargs: Any) -> Rollouts:
        return prompts


class Rewards:
    """The response is its reward; anything that is no number fails."""

    def score(self, rollouts: Rollouts, *, step: int, may_all_fail: bool = False) -> Scores:
        texts = ["".join(chr(i) for i in row.tolist() if i > 1) for row in rollouts.response_ids_BR]
        outcomes = [
            RewardOutcome(score=float(text)) if text.isdigit() else RewardOutcome(kind="timeout", message="too slow")
            for text in texts
        ]
        scores = to_scores(outcomes, ["arithmetic"] * len(texts))
        if not may_all_fail:
            require_any([scores], step=step)
        return scores


def validate(*batches: list[str]) -> dict[str, float]:
    validator = Validator(
        lambda: [make_rollouts(texts) for texts in batches],  # pyright: ignore[reportArgumentType]
        SamplingParams(max_tokens=4),
        n=1,
        seed=1,
        on_samples=lambda step, answered: None,
    )
    return validator.run(Policy(), Rewards(), 3)  # pyright: ignore[reportArgumentType]


def test_a_last_batch_whose_only_reward_fails_does_not_end_the_run() -> None:
    metrics = validate(["1", "0"], ["hang"])
    assert metrics["val-core/arithmetic/reward/mean@1"] == 0.5
    assert metrics["val-aux/arithmetic/failed_rewards"] == 1


def test_when_every_reward_fails_the_run_ends_with_the_first_failure() -> None:
    with pytest.raises(RewardError, match=r"step 3.*every response \(3\) failed \(3 x timeout\).*too slow"):
        validate(["hang", "hang"], ["hang"])


def test_no_validation_set_gives_no_metrics() -> None:
    assert validate() == {}
