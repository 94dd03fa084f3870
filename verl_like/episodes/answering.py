"""Prompts answered by groups of episodes, each graded as it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from verl_like.batch import MediaHandle, Prompt, Scores, usable_number
from verl_like.episodes.episode import Episode, EpisodeAborted, EpisodeFailure, EpisodeRunner
from verl_like.episodes.first_n import GRACE_S, all_of, end, first_of
from verl_like.episodes.loop import Arrivals
from verl_like.episodes.outcomes import Policies
from verl_like.heartbeat import EPISODE
from verl_like.models.images import MediaError
from verl_like.rewards.grading import Answer, Graded
from verl_like.rewards.manager import RewardManager
from verl_like.rewards.parts import combine
from verl_like.rewards.reward_call import RewardOutcome, is_finite_reward
from verl_like.rollout.client import RolloutClient
from verl_like.rollout.rollout_engine import (
    NOTHING,
    Completion,
    GenerationRequest,
    Partial,
    ResumeError,
    SamplingParams,
    request_seed,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_S = 0.05  # at least, between two looks at the clock of an episode


class DraftHistory(Protocol):
    """Keeps the responses of earlier epochs (`rollout.speculative`), by the number of a data row and the turn."""

    def of(self, index: int, turn: int) -> Sequence[NDArray[np.int32]]:
        """Earlier responses."""
        ...

    def note(self, index: int, turn: int, completion: Completion) -> None:
        """Remember one more, and what became of its drafts."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the responses since the last call."""
        ...

    def write(self, folder: Path) -> None:
        """Write all into a folder that becomes a checkpoint."""
        ...

    def read(self, folder: Path) -> None:
        """Read what `write` wrote; nothing where it wrote nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """Settings by which prompts are answered.

    purpose: keeps the ids and seeds of training and validation apart.
    n: episodes of a prompt that are used.
    seed: the run's; with None, requests have no seed.
    n_redundant: episodes begun beyond `n`; the first `n` that end are kept.
    spread: let the n requests of a prompt go to different replicas; otherwise one replica shares their beginning.
    greedy_too: run one greedy episode more, for a baseline.
    grade_at_end: grade when all episodes have ended, not each as it ends.
    priority: of its requests; the lower it is, the earlier they are sampled.
    policies: say what becomes of lost episodes.
    tool_usage: returns the metrics of the tools since its last call.
    drafts: earlier responses, which engines are told (rollout.speculative).
    """

    runner: EpisodeRunner
    sampling: SamplingParams
    n: int
    seed: int | None
    purpose: str
    n_redundant: int = 0
    spread: bool = False
    greedy_too: bool = False
    grade_at_end: bool = False
    priority: int = 0
    policies: Policies = field(default_factory=Policies)
    tool_usage: Callable[[], dict[str, float]] = dict
    drafts: DraftHistory | None = None

    @property
    def num_begun(self) -> int:
        """Episodes of a prompt that are begun, without a greedy one."""
        return self.n + self.n_redundant


@dataclass(slots=True, eq=False)
class Member:
    """One episode, and what the graders have of it. retried: outcomes of those that were lost before in its place."""

    prompt: Prompt
    episode: Episode
    graded: Graded | None = None
    retried: list[str] = field(default_factory=list)

    def answer(self) -> Answer:
        """Return what is graded: everything after the prompt of the last row."""
        prompt_ids, row = self.episode.rows()[-1][0].observation_ids, self.prompt.row
        if self.episode.info:
            row = dataclasses.replace(row, extra_info={**row.extra_info, **self.episode.info})
        return Answer(row=row, prompt_ids=prompt_ids, response_ids=self.episode.response_array())

    def known_outcome(self) -> RewardOutcome | None:
        """Return the outcome of an episode that needs no grader; None where graders are needed."""
        if (failure := self.episode.failure) is not None:
            return RewardOutcome(kind=failure.kind, message=failure.message, lost=True)
        rewards = [turn.reward or 0.0 for turn in self.episode.turns] + [self.episode.reward or 0.0]
        if not is_finite_reward(sum(map(abs, rewards))):  # each is, by itself: see `to_reward`
            message = f"the rewards of the turns, {rewards!r:.200}, add up to no finite 32-bit float"
            return RewardOutcome(kind="bad_value", message=message, lost=True)
        if self.episode.reward is None:
            return None
        won = usable_number(self.episode.info.get("success"))  # of a game: what counts as right, whatever its score
        return RewardOutcome(score=self.episode.reward, extras={} if won is None else {"acc": won})


@dataclass(slots=True, eq=False)
class Group:
    """The episodes of one prompt; the last is greedy where there is a baseline. discarded: those that were begun too,
    and not needed."""

    prompt: Prompt
    members: list[Member]
    has_baseline: bool = False
    scores: Scores | None = None  # of the episodes, where the group had to be judged
    discarded: Sequence[Trail] = ()

    @property
    def sampled(self) -> list[Member]:
        """Without the baseline."""
        return self.members[:-1] if self.has_baseline else self.members

    @property
    def baseline(self) -> Member:
        """The greedy member."""
        assert self.has_baseline
        return self.members[-1]


def all_graded(members: Iterable[Member], rewards: RewardManager) -> list[Graded]:
    """Return the `Graded` of each of these members; those not yet with the graders are handed to them first."""
    members = list(members)
    ungraded = [member for member in members if member.graded is None]
    answers, outcomes = [m.answer() for m in ungraded], [m.known_outcome() for m in ungraded]
    for member, graded in zip(ungraded, rewards.grade(answers, outcomes), strict=True):
        member.graded = graded
    return [member.graded for member in members if member.graded is not None]


@dataclass(slots=True, eq=False)
class Collection:
    """The episodes of one call, up to `end`. Its methods run in the event loop. on_end: called as each ends."""

    how: Answering
    client: RolloutClient
    rewards: RewardManager
    arrivals: Arrivals
    partials: dict[int, Partial] = field(default_factory=dict)  # by sample: what a checkpoint has of it
    on_end: Callable[[], None] = lambda: None
    ended: bool = False
    _trails: dict[int, list[Trail]] = field(default_factory=dict)  # by prompt
    _to_grade: list[Member] = field(default_factory=list)

    async def group(self, prompt: Prompt) -> Group:
        """All episodes of one prompt. EpisodeAborted after `end`; any other error of one ends the others too."""
        how = self.how
        members = [self._member(prompt, sample, how.sampling) for sample in range(how.num_begun)]
        greedy_too = dataclasses.replace(how.sampling, do_sample=False)
        baseline = [self._member(prompt, how.num_begun, greedy_too)] if how.greedy_too else []
        if not how.n_redundant:
            return Group(prompt, await all_of([*members, *baseline]), has_baseline=how.greedy_too)
        kept, ended = await first_of(members, how.n, lambda member: member.episode.failure is None, baseline)
        begun = [trail for trail in self._trails[prompt.group] if trail.sample < how.num_begun]
        discarded = [trail for trail in begun if trail.sample not in kept]
        for trail in discarded:
            trail.over = True
        return Group(prompt, [*kept.values(), *ended], has_baseline=how.greedy_too, discarded=discarded)

    async def end(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """End these tasks and ask for nothing more; return when no request of the collection is left."""
        self.ended = True
        await end(tasks)
        requests = {name: future for trail in self.trails for name, future in trail.requests if not future.done()}
        if requests:
            self.client.abort(list(requests))
            left = [asyncio.wrap_future(each) for each in requests.values()]
            for each in left:  # whoever asked has heard of an error: asyncio would tell it once more
                each.add_done_callback(lambda request: request.cancelled() or request.exception())
            await asyncio.wait(left, timeout=GRACE_S)

    @property
    def trails(self) -> list[Trail]:
        """Trails of all episodes that were begun, including those that were lost and sampled again."""
        return [trail for trails in self._trails.values() for trail in trails]

    def sampled_tokens(self) -> list[int]:
        """Count the tokens sampled so far, for each episode that was begun, without baselines."""
        return [trail.num_sampled() for trail in self.trails if trail.sample < self.how.num_begun]

    async def _member(self, prompt: Prompt, sample: int, sampling: SamplingParams) -> Member:
        """One episode; where it is lost, and the policy is to retry, another one in its place, with other seeds."""
        policies, retried = self.how.policies, list[str]()
        for attempt in itertools.count():
            member = Member(prompt, await self._attempt(prompt, sample, sampling, attempt), retried=retried)
            failure = member.episode.failure
            outcome = await self._grader_error(member) if failure is None else failure.outcome
            if outcome is None or not policies.retries(outcome) or attempt >= policies.max_retries or self.ended:
                break
            retried.append(outcome)
            why = "no reward" if failure is None else failure.message
            logger.warning("prompt %d is sampled again (%s): %.500s", prompt.group, outcome, why)
        EPISODE.set("")  # what begins from here on is no part of it
        if not self.how.grade_at_end and not self.ended and member.graded is None:
            self._grade_soon(member)
        self.on_end()
        return member

    async def _grader_error(self, member: Member) -> str | None:
        """The grader's verdict, if a missing one is a reason to sample again; None for a good one."""
        if not self.how.policies.retries("grader_error"):
            return None
        (graded,) = all_graded([member], self.rewards)
        outcomes = [await self.arrivals.wait_for(future) for future in graded.futures]
        score = combine([scorer.part for scorer in graded.scorers], outcomes).score
        return "grader_error" if score is None else None

    async def _attempt(self, prompt: Prompt, sample: int, sampling: SamplingParams, attempt: int) -> Episode:
        trail = Trail(prompt, sample, attempt)
        self._trails.setdefault(prompt.group, []).append(trail)
        name = f"{self.how.purpose}-{prompt.group}-{sample}" + (f"-retry{attempt}" if attempt else "")
        EPISODE.set(name)  # an episode is a task of its own
        try:
            episode = await self._in_time(prompt, self._run(Asker(self, trail, sampling)))
        except MediaError as error:
            episode = Episode.lost(prompt, EpisodeFailure(kind="media", message=str(error)))
        except EpisodeAborted as error:
            if self.ended:
                raise
            failure = EpisodeFailure(kind="aborted", message=str(error), outcome="aborted")
            episode = Episode.lost(prompt, failure)
        if not trail.over:
            trail.failure = episode.failure
        return episode.named(name)

    async def _run(self, ask: Asker) -> Episode:
        if ask.trail.prompt.problem:
            raise MediaError(ask.trail.prompt.problem)
        try:
            return await self.how.runner.run(ask.trail.prompt, ask.trail.sample, ask)
        except (SystemExit, KeyboardInterrupt) as error:  # they would end the event loop, and nobody would hear of it
            raise RuntimeError(f"{ask} tried to end the process: {error!r}") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling() == 0:  # nobody asked for it
                raise RuntimeError(f"{ask} was cancelled from within") from error
            raise

    async def _in_time(self, prompt: Prompt, episode: Coroutine[Any, Any, Episode]) -> Episode:
        """The episode, or one that timed out: only time in which replicas serve counts."""
        limit = self.how.policies.episode_timeout
        if limit is None:
            return await episode
        task, begun = asyncio.ensure_future(episode), self.client.serving_s()
        try:
            while not task.done() and (left := begun + limit - self.client.serving_s()) > 0:
                await asyncio.wait({task}, timeout=max(left, _LOOK_S))
            if task.done():
                return task.result()
        finally:
            await end([task])
        what = f"not ended within rollout.outcomes.episode_timeout={limit:g} s"
        return Episode.lost(prompt, EpisodeFailure(kind="episode_timeout", message=what, outcome="timed_out"))

    def _grade_soon(self, member: Member) -> None:
        """With all others that end in this pass of the event loop."""
        if not self._to_grade:
            asyncio.get_running_loop().call_soon(self._grade)
        self._to_grade.append(member)

    def _grade(self) -> None:
        members, self._to_grade = self._to_grade, []
        try:
            all_graded(() if self.ended else members, self.rewards)
        except Exception as error:  # whoever needs the scores asks for them again, and is told
            logger.warning("%d episodes that ended could not be given to the graders: %r", len(members), error)


@dataclass(slots=True, eq=False)
class Trail:
    """Requests of one episode.

    A trail holds no reference to its collection: tokens are freed with the last who wants them, not when the garbage
    collector finds a cycle.
    """

    prompt: Prompt
    sample: int
    attempt: int = 0  # how many episodes were lost in its place before
    requests: list[tuple[str, Future[Completion]]] = field(default_factory=list)  # one for each turn
    failure: EpisodeFailure | None = None  # of an episode that was lost
    over: bool = False  # nobody wants it any more

    def num_sampled(self) -> int:
        """Tokens of the turns that have ended, in whatever way."""
        done = [future for _, future in self.requests if future.done() and future.exception() is None]
        return sum(len(future.result().sampled) for future in done)


@dataclass(slots=True)
class Asker:
    """`Ask` for one episode: names, seeds and places its requests."""

    of: Collection
    trail: Trail
    sampling: SamplingParams

    async def __call__(
        self,
        context_ids: list[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        media: Sequence[MediaHandle] | None = None,
    ) -> Completion:
        """Sample one turn: see `episode.Ask`."""
        how, trail = self.of.how, self.trail
        group, turn = trail.prompt.group, len(trail.requests)
        if self.of.ended or trail.over:
            raise EpisodeAborted(f"prompt {group} is no longer wanted")
        sampling = sampling or self.sampling
        if max_tokens is not None and max_tokens < sampling.max_tokens:
            least = min(sampling.min_tokens, max_tokens)  # what is left of the response, or a client's own limit
            sampling = dataclasses.replace(sampling, max_tokens=max_tokens, min_tokens=least)
        draw: tuple[int | str, ...] = (how.purpose, group, trail.sample, turn)
        if trail.attempt:
            draw += (f"retry{trail.attempt}",)
        request = GenerationRequest(
            request_id="-".join(map(str, draw)),
            prompt_ids=context_ids,
            sampling=sampling,
            media=self._media_of(context_ids) if media is None else media,
            seed=None if how.seed is None else request_seed(how.seed, *draw),
            session=f"{how.purpose}-{group}-{trail.sample}" if how.spread else f"{how.purpose}-{group}",
            turn=turn,
            priority=how.priority,
            drafts=() if how.drafts is None else how.drafts.of(trail.prompt.row.index, turn),
        )
        completion = await self._completed(request)
        if completion.finish_reason == "abort":
            raise EpisodeAborted(f"request {request.request_id} was aborted")
        if how.drafts is not None:
            how.drafts.note(trail.prompt.row.index, turn, completion)
        return completion

    async def _completed(self, request: GenerationRequest) -> Completion:
        """Sample this request, beginning with the tokens that a checkpoint has of it."""
        name, partial, requests = request.request_id, None, self.trail.requests
        if not requests and self.trail.attempt == 0:
            partial = self.of.partials.pop(self.trail.sample, None)
        if partial is not None and partial.finish is not None:
            done: Future[Completion] = Future()
            done.set_result(Completion(request_id=name, sampled=partial, finish_reason=partial.finish))
            requests.append((name, done))
            return done.result()
        if partial is not None:
            request = dataclasses.replace(request, resume=partial)
        future = self.of.client.submit(request)
        requests.append((name, future))
        try:
            return await self.of.arrivals.wait_for(future)
        except asyncio.CancelledError:  # the episode has ended, or the runner's patience with this turn
            self.of.client.abort([name])
            raise
        except ResumeError:  # the engine cannot go on from there
            requests.pop()
            return await self._completed(dataclasses.replace(request, resume=NOTHING))

    def _media_of(self, context_ids: list[int]) -> list[MediaHandle]:
        """The prompt's images. ValueError for a context that does not begin with the prompt: nobody knows where they
        are in it."""
        media, ids = self.trail.prompt.row.media, self.trail.prompt.ids
        if media and context_ids[: len(ids)] != ids:
            raise ValueError(
                f"{self} has images, but was asked to go on behind other tokens than those of its prompt: agent loops "
                "and templates that write the prompt anew are not available for rows with images"
            )
        return media

    def __str__(self) -> str:
        prompt = self.trail.prompt
        return f"the episode of prompt {prompt.group} (dataset index {prompt.row.index}), sample {self.trail.sample},"
