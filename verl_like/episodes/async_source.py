"""Groups that live across steps: where batches come from in the asynchronous modes.

    loader --prompts--> groups under way --as they end, and are of use--> ended --a step's batch--> the trainer
                              |
                              +-- stay where they are while replicas are paused, and go on under the next weights

Responses that run and groups that wait are as many as async_training.* says. Which of the groups that have ended a step
trains, and when it waits for one that would grow too old, is the book's decision (staleness.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verl_like.batch import Prompt
from verl_like.config import PPOConfig
from verl_like.config.batch_plan import prompts_in_flight
from verl_like.data.loader import PromptLoader
from verl_like.episodes.answering import Answering, Collection, Group
from verl_like.episodes.dynamic_sampling import PASSES_WITHOUT_BOUND
from verl_like.episodes.episode import SingleTurn
from verl_like.episodes.group_filter import Judge
from verl_like.episodes.ledger import Ledger, filter_metrics
from verl_like.episodes.loop import Arrivals
from verl_like.episodes.partial_responses import ByGroup
from verl_like.episodes.staleness import Book
from verl_like.rewards.manager import RewardManager
from verl_like.rollout.client import Occupancy, RolloutClient
from verl_like.rollout.rollout_engine import NOTHING, Partial, Sampled

logger = logging.getLogger(__name__)
_LOOK_S = 0.05  # between two looks at what the replicas have to do


@dataclass(slots=True, eq=False)
class _Flight:
    """One group under way. left: its responses that are being sampled. group: when it has ended."""

    prompt: Prompt
    collection: Collection
    left: int
    task: asyncio.Task[None] | None = None
    group: Group | None = None


@dataclass(slots=True)
class _Told:
    """For the metrics, since the last batch."""

    dropped: list[Group] = field(default_factory=list)  # judged useless
    stale_groups: int = 0
    stale_tokens: int = 0


class Flow:
    """Begins groups, keeps them going, and gives each step those that it trains.

    total_steps: of the run: no group is begun that no step is left for; None: not known. never_pauses: the replicas
    serve while the policy trains, so what a batch leaves free is begun at once, not with the next step. Everything but
    the constructor runs in the event loop of the episodes.
    """

    def __init__(
        self,
        config: PPOConfig,
        loader: PromptLoader,
        rewards: RewardManager,
        how: Answering,
        arrivals: Arrivals,
        *,
        total_steps: int | None,
        never_pauses: bool,
    ) -> None:
        self._settings, self._loader, self._rewards, self._how = config.async_training, loader, rewards, how
        self._arrivals, self._total_steps, self._never_pauses = arrivals, total_steps, never_pauses
        self._wanted = config.data.train_batch_size
        self._each = how.num_begun + how.greedy_too  # responses of a group
        self._most_groups = config.async_training.groups_under_way(self._wanted)
        self._most_running = prompts_in_flight(config) * self._each
        self._running = 0  # responses
        self._sampled_from = 0  # groups of which a response runs
        self._being_trained = 0  # groups: their places are free when the version is the next one, and not before
        rules = config.algorithm.filter_groups
        self._judge = Judge(config, rewards, how.policies) if rules.enable and rules.resample else None
        passes = PASSES_WITHOUT_BOUND * max(loader.steps_per_epoch, 1)
        self._most_judged = (data := config.data.gen_batch_size or self._wanted) * (rules.max_num_gen_batches or passes)
        self._per_draw = data
        self._book = Book(self._wanted, self._settings.max_staleness, waits=self._settings.beyond == "wait")
        self._flights: dict[int, _Flight] = {}
        self._taken: list[_Flight] = []  # by a step that is not trained yet
        self._needed: float = math.inf  # groups that the steps left need
        self._version = 0
        self._begins = False
        self._wake = asyncio.Event()
        self._error: BaseException | None = None
        self._told = _Told()
        self._client: RolloutClient | None = None
        self._idle, self._watching = IdleClock(paused_too=never_pauses), None
        self._waited_s, self._period_began = 0.0, time.monotonic()  # for batches, since the last one
        self.metrics: dict[str, float] = {}  # of the period that ended with the last batch
        self.ledger = Ledger()
        self.partials: ByGroup = {}  # of a checkpoint, not begun again yet

    async def take(self, client: RolloutClient, step: int) -> list[Group]:
        """The groups that this step trains, in the order of their draws, when they are there.

        Raises what an episode raises, RewardError, and ValueError where dynamic sampling finds too few groups.
        """
        came = time.monotonic()
        if self._client is None:
            self._client = client
            self._watching = asyncio.ensure_future(self._watch(client))
        if self._judge is not None:
            self._judge.step = step
        if self._total_steps is not None:
            self._needed = (self._total_steps - step + 1) * self._wanted
        await self._drop_old()
        self._begins = True
        self._begin()
        while (chosen := self._book.batch(self._version)) is None:
            self._raise_if_hopeless()
            self._wake.clear()
            await self._wake.wait()
        self._waited_s += time.monotonic() - came
        self._begins = self._never_pauses
        self._taken = [self._flights.pop(name) for name in chosen]
        for name in chosen:
            self._book.forget(name)
        self._needed -= self._wanted
        self._being_trained = self._wanted
        self._begin()
        groups = [flight.group for flight in self._taken if flight.group is not None]
        if self._judge is not None:
            self._judge.report([*groups, *self._told.dropped])
        self.metrics = self._end_period()
        return groups

    async def trained(self) -> None:
        """The last batch is in the weights: it is no longer part of what a resumed run does again."""
        self.ledger.used += len(self._taken)
        self._taken = []

    async def weights_changed(self, version: int) -> None:
        """Groups that begin from now on begin under these."""
        self._version, self._being_trained = version, 0
        self._begin()

    async def state(self) -> dict[str, Any]:
        """The loader's, to which every group that is not trained goes back under its number, and the ledger."""
        state = self._loader.state_dict()
        again = [[flight.prompt.position, flight.prompt.group] for flight in self._all()]
        state["returned"] = sorted([*state["returned"], *again], key=lambda pair: pair[1])
        return {**state, "ledger": self.ledger.state_dict()}

    async def tokens(self, running: Mapping[str, Sampled]) -> ByGroup:
        """What is sampled of the groups that are not trained. running: the client's snapshot."""
        if not isinstance(self._how.runner, SingleTurn):
            return {}
        found = {name: dict(samples) for name, samples in self.partials.items()}
        for flight in self._all():
            samples = dict(flight.collection.partials)
            for trail in flight.collection.trails:
                if trail.attempt == 0 and trail.requests:
                    name, future = trail.requests[0]
                    done = future.result() if future.done() and future.exception() is None else None
                    if done is not None and done.finish_reason != "abort":
                        samples[trail.sample] = Partial.from_sampled(done.sampled, done.finish_reason)
                    elif len(sampled := running.get(name, NOTHING)):
                        samples[trail.sample] = Partial.from_sampled(sampled)
            if samples:
                found[flight.prompt.group] = samples
        return found

    def _end_period(self) -> dict[str, float]:
        """Metrics since the batch before; their counts start anew. async/*: groups under way, those of them that have
        ended; groups and tokens dropped as stale; see IdleClock. trainer_waited: share of the time, for batches."""
        now = time.monotonic()
        waited, passed, self._waited_s, self._period_began = self._waited_s, now - self._period_began, 0.0, now
        book, told, self._told = self._book, self._told, _Told()
        found = {
            "async/running_groups": float(len(book.running)),
            "async/ended_groups": float(len(book.ended)),
            "async/dropped_groups": float(told.stale_groups),
            "async/dropped_tokens": float(told.stale_tokens),
            "async/trainer_waited": waited / (passed or 1.0),
            **self._idle.shares(),
        }
        if self._judge is not None:
            seen = self._judge.seen
            draw, dropped = self._per_draw, len(told.dropped)
            found |= filter_metrics(seen, num_judged=len(seen), num_dropped=dropped, per_draw=draw)
            self._judge.begin(self._judge.step)
        return found

    async def end(self) -> None:
        """Begin nothing any more."""
        self._begins = False
        if self._watching is not None:
            self._watching.cancel()

    def _all(self) -> list[_Flight]:
        return [*self._taken, *self._flights.values()]

    def _begin(self) -> None:
        """Begin as many groups as there is room for, while that is wanted."""
        waiting = len(self._flights) - self._sampled_from  # for graders, or for a step
        room = min(self._most_groups - self._being_trained, self._needed) - len(self._book)
        count = int(min(room, (self._most_running - self._running) // self._each - waiting))
        if not self._begins or count <= 0 or self._error is not None or len(self._book.ended) >= self._wanted:
            return
        assert self._client is not None
        for prompt in self._loader.draw(count):
            partials = self.partials.pop(prompt.group, {})
            collection = Collection(self._how, self._client, self._rewards, self._arrivals, partials=partials)
            flight = self._flights[prompt.group] = _Flight(prompt, collection, self._each)
            collection.on_end = partial(self._one_less, flight)
            self._running += self._each
            self._sampled_from += 1
            versions = [int(one.weight_versions.min()) for one in partials.values() if len(one)]
            self._book.begin(prompt.group, min(versions, default=self._version))
            flight.task = asyncio.ensure_future(self._fly(flight))
            flight.task.add_done_callback(self._landed)

    async def _fly(self, flight: _Flight) -> None:
        """One group, from its first request to the verdict on it."""
        group = await flight.collection.group(flight.prompt)
        self._let_go(flight)  # of what ran in vain
        if self._judge is not None:
            await self._judge.graded(flight.collection, group)
            if not self._judge.keeps(group):
                self._told.dropped.append(group)
                self.ledger.dropped += 1
                self._forget(flight)
                return
        flight.group = group
        self._book.end(flight.prompt.group)

    def _landed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
        try:
            self._begin()
        except Exception as error:  # of the data: nobody else would hear of it
            self._error = self._error or error
        self._wake.set()

    def _one_less(self, flight: _Flight) -> None:
        """One response of the group has ended, and is counted no longer, unless the group was given up before."""
        if flight.left:
            flight.left -= 1
            self._running -= 1
            self._sampled_from -= not flight.left
            self._begin()

    def _let_go(self, flight: _Flight) -> None:
        self._sampled_from -= flight.left > 0
        self._running, flight.left = self._running - flight.left, 0
        flight.collection.on_end = lambda: None  # the flight in its place is a circle, that would keep the tokens

    def _forget(self, flight: _Flight) -> None:
        self._let_go(flight)
        self._book.forget(flight.prompt.group)
        self._flights.pop(flight.prompt.group, None)

    async def _drop_old(self) -> None:
        """async_training.beyond=drop: end the groups that are too old for this step."""
        if self._settings.beyond != "drop":
            return
        old = [self._flights[name] for name in self._book.too_old(self._version)]
        for flight in old:
            self._forget(flight)
        await asyncio.gather(*(self._abort(flight) for flight in old))
        self._told.stale_groups += len(old)
        self._told.stale_tokens += sum(sum(flight.collection.sampled_tokens()) for flight in old)
        self.ledger.stale += len(old)

    async def _abort(self, flight: _Flight) -> None:
        assert flight.task is not None
        flight.task.remove_done_callback(self._landed)
        await flight.collection.end([flight.task])

    async def _watch(self, client: RolloutClient) -> None:
        while True:
            seen = client.occupancy()
            self._idle.look(seen, self._why_idle(seen.pending))
            await asyncio.sleep(_LOOK_S)

    def _why_idle(self, pending: int) -> str:
        """Why a replica has nothing to sample."""
        if self._running > pending:
            return "tool"  # of an episode, or its environment
        if len(self._book.ended) >= self._wanted:
            return "trainer"  # it has a batch to train first
        if len(self._flights) > self._sampled_from + len(self._book.ended):  # of some, all responses have ended
            return "grader"
        return "tail"

    def _raise_if_hopeless(self) -> None:
        if self._error is not None:
            raise self._error
        if self._judge is not None and len(self._judge.seen) >= self._most_judged:
            self._judge.require_enough()
            raise ValueError(self._judge.gave_up())


CAUSES: tuple[str, ...] = ("tail", "tool", "grader", "trainer", "weights")


class IdleClock:
    """Shares of the replicas' time by cause, added up at each look.

    paused_too: replicas that serve nothing now wait for weights (where a pool does nothing but sample); otherwise they
    train, and that time does not count.
    """

    def __init__(self, *, paused_too: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._paused_too, self._clock = paused_too, clock
        self._last, self._total_s = clock(), 0.0
        self._idle_s = dict.fromkeys(CAUSES, 0.0)

    def look(self, seen: Occupancy, cause: str) -> None:
        """As it was since the last look: `cause` is why those that serve have nothing to do."""
        now = self._clock()
        passed, self._last = now - self._last, now
        counted = seen.replicas if self._paused_too else seen.replicas - seen.held
        self._total_s += passed * counted
        self._idle_s[cause] += passed * seen.idle
        if self._paused_too:
            self._idle_s["weights"] += passed * seen.held

    def shares(self) -> dict[str, float]:
        """async/idle_<cause> since they were asked for last."""
        found = {f"async/idle_{cause}": idle_s / (self._total_s or 1.0) for cause, idle_s in self._idle_s.items()}
        self._total_s, self._idle_s = 0.0, dict.fromkeys(CAUSES, 0.0)
        return found
