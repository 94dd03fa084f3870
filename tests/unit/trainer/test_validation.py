"""Validation over several batches: a failed reward is counted, and only the failure of all ends the run."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from tests.unit.rewards.factory import make_rollouts
from verl_like.batch import Rollouts
from verl_like.rewards.grading import Grading, RewardError, Scorer
from verl_like.rewards.parts import Part
from verl_like.rewards.reward_call import RewardCall, RewardOutcome
from verl_like.rollout.rollout_engine import Completion, Sampled, SamplingParams
from verl_like.trainer.validation import Validator


class Policy:
    """Answers each batch with the batch itself, the last row first."""

    def generate(self, prompts: Rollouts, sampling: SamplingParams, *, on_response: Any, **kwargs: Any) -> Rollouts:
        for row in reversed(range(len(prompts))):
            ids = [i for i in prompts.response_ids_BR[row].tolist() if i > 1]
            on_response(
                row,
                Completion(request_id=str(row), sampled=Sampled.of(ids, [0.0] * len(ids), 0), finish_reason="stop"),
            )
        return prompts


class Rewards:
    """The response is its reward; anything that is no number fails."""

    graded_by = "the test"

    def begin(self, prompts: Rollouts, *, n: int, step: int, may_all_fail: bool) -> Grading:
        return Grading(
            prompts.rows,
            step=step,
            decode=lambda ids: "".join(map(chr, ids)),
            scorers_of=lambda row: [Scorer(Part("custom"), lambda calls: [self.grade(call) for call in calls])],
            may_all_fail=may_all_fail,
        )

    def grade(self, call: RewardCall) -> Future[RewardOutcome]:
        future: Future[RewardOutcome] = Future()
        text = call.solution_str
        timeout = RewardOutcome(kind="timeout", message="too slow")
        future.set_result(RewardOutcome(score=float(text)) if text.isdigit() else timeout)
        return future


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
    with pytest.raises(RewardError, match=r"(?s)step 3.*every response \(3\) failed \(3 x timeout\).*too slow"):
        validate(["hang", "hang"], ["hang"])


def test_no_validation_set_gives_no_metrics() -> None:
    assert validate() == {}
