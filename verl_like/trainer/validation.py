"""Validation: answer every validation prompt with rollout.val_kwargs, score, and report per data source."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from verl_like.batch import Prompts, Rollouts, Scores
from verl_like.observe.validation import validation_metrics
from verl_like.rewards.grading import Grading, require_enough
from verl_like.rewards.manager import RewardManager
from verl_like.rollout.rollout_engine import SamplingParams
from verl_like.trainer.roles import PolicyGroup

# Training numbers its seeds by step; validation draws from a range of its own.
_SEED_OFFSET = 1 << 40


class Validator:
    """Runs over the whole validation set; without one it returns no metrics."""

    def __init__(
        self,
        batches: Callable[[], Iterable[Prompts]],
        sampling: SamplingParams,
        *,
        n: int,
        seed: int | None,
        on_samples: Callable[[int, list[tuple[Rollouts, Scores]]], None],
    ) -> None:
        self.batches, self.sampling, self.n, self.seed = batches, sampling, n, seed
        self.on_samples = on_samples

    def run(self, policy: PolicyGroup, rewards: RewardManager, step: int) -> dict[str, float]:
        """val-core/* and val-aux/* of the weights that the rollout engine holds.

        A small batch may lose all its rewards (the last one may be a single prompt); RewardError if all batches do.
        """
        batches: list[tuple[Rollouts, Grading]] = []
        for prompts in self.batches():
            grading = rewards.begin(prompts, n=self.n, step=step, may_all_fail=True)
            rollouts = policy.generate(
                prompts,
                self.sampling,
                n=self.n,
                seed=self.seed,
                step=step + _SEED_OFFSET,
                on_response=grading.add,
            )
            batches.append((rollouts, grading))
        answered = [(rollouts, grading.result()) for rollouts, grading in batches]
        require_enough([scores for _, scores in answered], step=step, graded_by=rewards.graded_by)
        self.on_samples(step, answered)
        return validation_metrics(answered)
