"""Batches of groups that can teach something: dynamic sampling (algorithm.filter_groups), as sources for `fit`.

`ResamplingSource` draws until the batch is full of groups with a signal; `MaskingSource` draws once and masks the
others. Both need the scores to choose, so grading is over when they return.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl_like.algorithms.group_filter import has_signal_B
from verl_like.batch import Prompts, Rollouts, Scores, whole_episodes
from verl_like.config import PPOConfig
from verl_like.data.loader import PromptLoader
from verl_like.rewards.manager import RewardManager
from verl_like.rollout.rollout_engine import SamplingParams
from verl_like.trainer.roles import PolicyGroup

logger = logging.getLogger(__name__)

PASSES_WITHOUT_BOUND = 10  # max_num_gen_batches=0: a step that has seen all prompts ten times will not fill up


@dataclass(frozen=True, slots=True)
class Graded:
    """Scores that are there already, in the place of a `Grading`."""

    scores: Scores

    def wait(self) -> None:
        """Nothing to wait for."""

    def result(self) -> Scores:
        return self.scores


@dataclass(slots=True)
class Tally:
    """What one step's draws came to."""

    draws: int = 0
    drawn: int = 0  # groups
    dropped: int = 0
    unused: int = 0
    score_sum: float = 0.0
    num_scores: int = 0

    def count(self, rollouts: Rollouts, scores: Scores, dropped: int) -> None:
        """Take one draw in."""
        rollouts, scores = whole_episodes(rollouts, scores)
        self.draws += 1
        self.drawn += len(rollouts.group_B.unique())
        self.dropped += dropped
        self.score_sum += scores.score_B[scores.valid_B].double().sum().item()
        self.num_scores += int(scores.valid_B.sum())

    def score_mean(self) -> float:
        """Over all valid responses that were drawn, so that the choice of groups does not bias it."""
        return self.score_sum / max(self.num_scores, 1)

    def metrics(self) -> dict[str, float]:
        """train/num_gen_batches (verl's name) and filter_groups/*."""
        return {
            "train/num_gen_batches": float(self.draws),
            "filter_groups/num_drawn": float(self.drawn),
            "filter_groups/num_dropped": float(self.dropped),
            "filter_groups/num_unused": float(self.unused),
            "filter_groups/signal_fraction": 1 - self.dropped / max(self.drawn, 1),
            "filter_groups/score_mean_drawn": self.score_mean(),
        }


class FilteringSource:
    """What both sources share: answering prompts, grading them, judging groups, and the loader's state."""

    def __init__(
        self, loader: PromptLoader, sampling: SamplingParams, config: PPOConfig, *, n: int, seed: int | None
    ) -> None:
        self.loader, self.sampling, self.n, self.seed = loader, sampling, n, seed
        self.rules, self.reward_model, self.data = config.algorithm.filter_groups, config.reward_model, config.data
        self.tally = Tally()

    def answer(
        self, prompts: Prompts, policy: PolicyGroup, rewards: RewardManager, step: int
    ) -> tuple[Rollouts, Scores, torch.Tensor]:
        """Rollouts of the prompts, their scores, and which rows (bool [B]) belong to groups with a signal."""
        grading = rewards.begin(prompts, n=self.n, step=step)
        rollouts = policy.generate(prompts, self.sampling, n=self.n, seed=self.seed, step=step, on_response=grading.add)
        scores = grading.result()
        limit = self.data.max_response_length
        signal_B = has_signal_B(self.rules, self.reward_model, rollouts, scores, limit)
        self.tally.count(rollouts, scores, dropped=len(rollouts.group_B[~signal_B].unique()))
        return rollouts, scores, signal_B

    def metrics(self) -> dict[str, float]:
        """Counts of the last step's draws."""
        return self.tally.metrics()

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


class ResamplingSource(FilteringSource):
    """Draws data.gen_batch_size prompts at a time until data.train_batch_size groups have a signal.

    Groups are taken in the order in which their prompts were drawn. Prompts whose groups were not needed go back to the
    sampler, to be drawn first next time; their answers belong to these weights and are thrown away.
    """

    def next_rollouts(self, policy: PolicyGroup, rewards: RewardManager, step: int) -> tuple[Rollouts, Graded]:
        """The step's batch. ValueError when the bound of draws is reached with too few groups."""
        self.tally, wanted = Tally(), self.data.train_batch_size
        kept: list[tuple[Rollouts, Scores]] = []
        positions: dict[int, int] = {}  # group -> position in the data set
        while (found := sum(len(rollouts.group_B.unique()) for rollouts, _ in kept)) < wanted:
            if self.tally.draws == self.max_draws():
                raise ValueError(self._gave_up(step, found))
            prompts, drawn = self.loader.draw()
            positions |= dict(zip(prompts.group_B.tolist(), drawn, strict=True))
            rollouts, scores, signal_B = self.answer(prompts, policy, rewards, step)
            if signal_B.any():
                kept.append((rollouts.select(signal_B), scores.select(signal_B)))
        return self._first_groups(kept, positions)

    def max_draws(self) -> int:
        """algorithm.filter_groups.max_num_gen_batches; 0: ten passes over the training prompts."""
        return self.rules.max_num_gen_batches or PASSES_WITHOUT_BOUND * max(self.loader.steps_per_epoch, 1)

    def _first_groups(
        self, kept: Sequence[tuple[Rollouts, Scores]], positions: dict[int, int]
    ) -> tuple[Rollouts, Graded]:
        rollouts = Rollouts.concat([part for part, _ in kept])
        scores = Scores.concat([part for _, part in kept])
        groups = list(dict.fromkeys(rollouts.group_B.tolist()))
        used, unused = groups[: self.data.train_batch_size], groups[self.data.train_batch_size :]
        self.loader.give_back([(positions[group], group) for group in unused])
        self.tally.unused = len(unused)
        rows_B = torch.isin(rollouts.group_B, torch.tensor(used))
        return rollouts.select(rows_B).trim(), Graded(renumbered(scores.select(rows_B)))

    def _gave_up(self, step: int, found: int) -> str:
        tally, rules = self.tally, self.rules
        return (
            f"step {step}: {tally.draws} draws ({tally.drawn} prompts, mean score {tally.score_mean():.3g}) gave "
            f"{found} groups with a signal, but data.train_batch_size={self.data.train_batch_size} are needed. The "
            "prompts are too easy or too hard for this model, or algorithm.filter_groups asks for too much "
            f"(metric={rules.metric}, range={rules.range}, std_threshold={rules.std_threshold}). Raise "
            f"algorithm.filter_groups.max_num_gen_batches={rules.max_num_gen_batches}, data.gen_batch_size="
            f"{self.data.gen_batch_size} or actor_rollout_ref.rollout.n, or keep and mask such groups: "
            "algorithm.filter_groups.resample=false"
        )


class MaskingSource(FilteringSource):
    """Draws data.train_batch_size prompts once; rows of groups without a signal stay, with nothing of them trained.

    Colossal-RL's dynamic_batching=false: the batch keeps its size and the step its cost, with fewer effective rows.
    """

    def next_rollouts(self, policy: PolicyGroup, rewards: RewardManager, step: int) -> tuple[Rollouts, Graded]:
        """The step's batch, with `Scores.trained_B`."""
        self.tally = Tally()
        rollouts, scores, signal_B = self.answer(self.loader.next(), policy, rewards, step)
        if not signal_B.any():
            logger.warning("step %d: no group has a signal (algorithm.filter_groups): nothing is learnt from it", step)
        return rollouts, Graded(scores.replace(trained_B=signal_B))


def renumbered(scores: Scores) -> Scores:
    """The same scores with failures that name their rows of this batch."""
    failures = [
        None if failure is None else dataclasses.replace(failure, row=row)
        for row, failure in enumerate(scores.failures)
    ]
    return scores.replace(failures=failures)
