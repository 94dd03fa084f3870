"""What a benchmark's responses are: of forced lengths, or the tokens that another trainer sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from verl_like.batch import Prompt, Rollouts
from verl_like.episodes.collector import Collector
from verl_like.episodes.episode import Ask, Episode, Turn
from verl_like.episodes.pending import PendingBatch
from verl_like.rollout.rollout_engine import Completion, Sampled, SamplingParams


class ForcedLengths:
    """An EpisodeRunner whose responses have exactly the lengths that `lengths(step)` gives: no end token ends them.

    Rows of a step are in the order prompts x n; a step draws `prompts` prompts, each once.
    """

    def __init__(
        self, sampling: SamplingParams, lengths: Callable[[int], Sequence[int]], *, prompts: int, n: int
    ) -> None:
        self.sampling = dataclasses.replace(sampling, stop_token_ids=(), stop=())
        self.lengths, self.prompts, self.n = lengths, prompts, n

    async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        return Episode(turns=(Turn.of(prompt.ids, await self.response(prompt, sample, ask)),))

    async def response(self, prompt: Prompt, sample: int, ask: Ask) -> Completion:
        """As many tokens as this row of its step must have."""
        step, row = self.place(prompt, sample)
        return await ask(prompt.ids, dataclasses.replace(self.sampling, max_tokens=self.lengths(step)[row]))

    def place(self, prompt: Prompt, sample: int) -> tuple[int, int]:
        """The step, from 1, and the row in it."""
        return prompt.group // self.prompts + 1, prompt.group % self.prompts * self.n + sample


class Replayed(ForcedLengths):
    """Samples as many tokens as the recording holds, then gives the recorded ones: same work, same numbers.

    recording[step - 1]: one list of response tokens per row.
    """

    def __init__(
        self, sampling: SamplingParams, recording: Sequence[Sequence[Sequence[int]]], *, prompts: int, n: int
    ) -> None:
        super().__init__(sampling, lambda step: [len(ids) for ids in recording[step - 1]], prompts=prompts, n=n)
        self.recording = recording

    async def response(self, prompt: Prompt, sample: int, ask: Ask) -> Completion:
        """Recorded tokens, with the log-probs of those that were sampled."""
        done, (step, row) = await super().response(prompt, sample, ask), self.place(prompt, sample)
        drawn = done.sampled
        recorded = Sampled.of(self.recording[step - 1][row], drawn.log_probs.tolist(), drawn.weight_versions.tolist())
        return dataclasses.replace(done, sampled=recorded)


class ReplayCollector(Collector):
    """Batches of recorded tokens: they have no log-probs of the engine."""

    def next_batch(self, step: int) -> tuple[Rollouts, PendingBatch]:
        rollouts, pending = super().next_batch(step)
        return rollouts.replace(rollout_log_probs_T=None), pending
