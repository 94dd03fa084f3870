"""Where a benchmark's batches come from: responses of forced lengths, or the tokens that another trainer sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from verl_like.batch import Rollouts, pad_rows
from verl_like.data.loader import PromptLoader
from verl_like.rewards.grading import Grading
from verl_like.rewards.manager import RewardManager
from verl_like.rollout.rollout_engine import SamplingParams
from verl_like.trainer.roles import PolicyGroup
from verl_like.trainer.source import PlainSource


class ForcedLengths(PlainSource):
    """Each response has exactly the length that `lengths(step)` gives it: the end token does not end it."""

    def __init__(
        self,
        loader: PromptLoader,
        sampling: SamplingParams,
        *,
        n: int,
        seed: int | None,
        lengths: Callable[[int], Sequence[int]],
    ) -> None:
        super().__init__(loader, dataclasses.replace(sampling, stop_token_ids=(), stop=()), n=n, seed=seed)
        self.lengths = lengths

    def next_rollouts(self, policy: PolicyGroup, rewards: RewardManager, step: int) -> tuple[Rollouts, Grading]:
        prompts = self.loader.next()
        grading = rewards.begin(prompts, n=self.n, step=step)
        rollouts = policy.generate(
            prompts,
            self.sampling,
            n=self.n,
            seed=self.seed,
            step=step,
            on_response=grading.add,
            max_tokens=self.lengths(step),
        )
        return rollouts, grading


class Replay(ForcedLengths):
    """Generates as many tokens as the recording holds, then trains on the recorded ones: same work, same numbers.

    recording[step - 1]: one list of response tokens per row, in the order prompts x n.
    """

    def __init__(
        self,
        loader: PromptLoader,
        sampling: SamplingParams,
        *,
        n: int,
        seed: int | None,
        recording: Sequence[Sequence[Sequence[int]]],
    ) -> None:
        super().__init__(
            loader, sampling, n=n, seed=seed, lengths=lambda step: [len(tokens) for tokens in recording[step - 1]]
        )
        self.recording = recording

    def next_rollouts(self, policy: PolicyGroup, rewards: RewardManager, step: int) -> tuple[Rollouts, Grading]:
        prompts = self.loader.next()
        sampled = policy.generate(
            prompts, self.sampling, n=self.n, seed=self.seed, step=step, max_tokens=self.lengths(step)
        )
        grading = rewards.begin(prompts, n=self.n, step=step)
        for row, tokens in enumerate(self.recording[step - 1]):
            grading.add_tokens(row, tokens)
        recorded = pad_rows(self.recording[step - 1], side="right", dtype=torch.int32)
        return sampled.replace(response_ids_BR=recorded, rollout_log_probs_BR=None), grading
