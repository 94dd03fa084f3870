"""Prompts answered by groups of episodes, each graded as it ends."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl_like.batch import Prompt, Scores
from verl_like.episodes.episode import Episode, EpisodeAborted, EpisodeRunner
from verl_like.rewards.grading import Graded
from verl_like.rewards.manager import RewardManager
from verl_like.rollout.client import RolloutClient
from verl_like.rollout.requests import request_seed
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, SamplingParams

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Group:
    """The episodes of one prompt, and what the graders have of each; the last is greedy where there is a baseline."""

    prompt: Prompt
    members: list[Member]
    has_baseline: bool = False
    scores: Scores | None = None  # of the episodes, where the group had to be judged

    @property
    def sampled(self) -> list[Member]:
        """Without the baseline."""
        return self.members[:-1] if self.has_baseline else self.members

    @property
    def baseline(self) -> Member:
        """The greedy member."""
        assert self.has_baseline
        return self.members[-1]


@dataclass(slots=True, eq=False)
class Member:
    """One episode, and what the graders have of it."""

    prompt: Prompt
    episode: Episode
    _graded: Graded | None = None

    def graded(self, rewards: RewardManager) -> Graded:
        """Give it to the graders, unless they have it."""
        if self._graded is None:
            context = self.episode.rows()[-1][0].observation_ids
            self._graded = rewards.grade(self.prompt.row, context, self.episode.response_ids())
        return self._graded


@dataclass(slots=True, kw_only=True)
class Answering:
    """How prompts are answered. Its methods run in the event loop.

    purpose: keeps ids and seeds of training and validation apart. seed: the run's; None: requests have no seed.
    spread: the n requests of a prompt may go to different replicas; otherwise one replica shares their beginning.
    greedy_too: one greedy episode more, for a baseline. grade_at_end: not as episodes end, but when all have.
    """

    runner: EpisodeRunner
    sampling: SamplingParams
    n: int
    seed: int | None
    purpose: str
    spread: bool = False
    greedy_too: bool = False
    grade_at_end: bool = False
    _aborted: list[int] = field(default_factory=list, init=False)

    async def group(self, client: RolloutClient, rewards: RewardManager, prompt: Prompt) -> Group:
        """All episodes of one prompt. EpisodeAborted if one was; any other error of one ends the others too."""
        members = [self._member(client, rewards, prompt, sample, self.sampling) for sample in range(self.n)]
        if self.greedy_too:
            greedy = dataclasses.replace(self.sampling, do_sample=False)
            members.append(self._member(client, rewards, prompt, self.n, greedy))
        return Group(prompt, await _all_of(members), has_baseline=self.greedy_too)

    def take_aborted(self) -> list[int]:
        """Tokens that each episode had sampled when it was aborted, of those since the last call."""
        aborted, self._aborted = self._aborted, []
        return aborted

    async def _member(
        self, client: RolloutClient, rewards: RewardManager, prompt: Prompt, sample: int, sampling: SamplingParams
    ) -> Member:
        ask = Asker(self, client, prompt, sample, sampling)
        try:
            member = Member(prompt, await self.runner.run(prompt, sample, ask))
        except EpisodeAborted:
            self._aborted.append(ask.num_sampled)
            raise
        if not self.grade_at_end:
            member.graded(rewards)
        return member


@dataclass(slots=True)
class Asker:
    """`Ask` for one episode: names, seeds and places its requests."""

    how: Answering
    client: RolloutClient
    prompt: Prompt
    sample: int
    sampling: SamplingParams
    turn: int = 0
    num_sampled: int = 0

    async def __call__(self, context_ids: list[int], sampling: SamplingParams | None = None) -> Completion:
        """See `episode.Ask`."""
        how, group = self.how, self.prompt.group
        draw = (how.purpose, group, self.sample, self.turn)
        request = GenerationRequest(
            request_id="-".join(map(str, draw)),
            prompt_ids=context_ids,
            sampling=sampling or self.sampling,
            seed=None if how.seed is None else request_seed(how.seed, *draw),
            session=f"{how.purpose}-{group}-{self.sample}" if how.spread else f"{how.purpose}-{group}",
            turn=self.turn,
        )
        self.turn += 1
        completion = await asyncio.wrap_future(self.client.submit(request))
        self.num_sampled += len(completion.sampled)
        if completion.finish_reason == "abort":
            raise EpisodeAborted(completion)
        return completion


async def _all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results; the first error ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        cancel(tasks)


def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """End those that have not ended."""
    for task in list(tasks):
        task.cancel()
