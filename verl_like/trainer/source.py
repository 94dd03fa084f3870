"""Where batches come from: the first of the loop's four seams.

`PlainSource` draws one batch of prompts and has it answered. Dynamic sampling, multi-turn and asynchronous rollout are
other classes with the same method, never another loop.
"""

from __future__ import annotations

from typing import Any, Protocol

from verl_like.batch import Rollouts, Scores
from verl_like.data.loader import PromptLoader
from verl_like.rewards.manager import RewardManager
from verl_like.rollout.rollout_engine import SamplingParams
from verl_like.trainer.roles import PolicyGroup


class PendingScores(Protocol):
    """Scores on their way (`rewards.grading.Grading`), or there already."""

    def wait(self) -> None: ...

    def result(self) -> Scores: ...


class BatchSource(Protocol):
    """Gives one step's rollouts and their scores, and remembers where in the data it is.

    Grading starts as each response ends; the scores may still be on their way when the rollouts are returned.
    """

    def next_rollouts(
        self, policy: PolicyGroup, rewards: RewardManager, step: int
    ) -> tuple[Rollouts, PendingScores]: ...

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PlainSource:
    """The next data.train_batch_size prompts, each answered rollout.n times."""

    def __init__(self, loader: PromptLoader, sampling: SamplingParams, *, n: int, seed: int | None) -> None:
        self.loader, self.sampling, self.n, self.seed = loader, sampling, n, seed

    def next_rollouts(self, policy: PolicyGroup, rewards: RewardManager, step: int) -> tuple[Rollouts, PendingScores]:
        prompts = self.loader.next()
        grading = rewards.begin(prompts, n=self.n, step=step)
        rollouts = policy.generate(prompts, self.sampling, n=self.n, seed=self.seed, step=step, on_response=grading.add)
        return rollouts, grading

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
