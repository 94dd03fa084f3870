"""The one source of batches: groups that are begun, judged as they end, and given to the step that trains them.

    loader --prompts--> groups under way --as they end, and are of use--> ended --a step's batch--> the trainer
                              |
                              +-- of no use: dropped; not needed: given back to the data

How a step is filled is said by three parameters:

- the order (selection.py, staleness.py): how many groups are begun, and which of them the step trains. A plain step
  begins one batch; dynamic sampling and additional prompts begin more until the batch is known;
- the judge (group_filter.py), where groups without a signal are to be replaced;
- whether groups live across steps (trainer.mode=*_async): they stay where they are while replicas are paused, and go on
  under the next weights. Otherwise a step begins with nothing, and ends what it does not need.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from verl_like.batch import Prompt, Rollouts, Scores
from verl_like.config import PPOConfig
from verl_like.config.batch_plan import draws_until_full, prompts_in_flight
from verl_like.config.errors import RunStopped
from verl_like.data.loader import PromptLoader
from verl_like.episodes import partial_responses
from verl_like.episodes.answering import Answering, Collection, Group
from verl_like.episodes.episode import SingleTurn
from verl_like.episodes.group_filter import Judge
from verl_like.episodes.ledger import Ledger, filter_metrics
from verl_like.episodes.partial_responses import ByGroup
from verl_like.episodes.selection import CompletionOrder, DrawOrder, Limits, Order, Selection
from verl_like.episodes.staleness import Book, IdleClock, Room
from verl_like.rewards.manager import RewardManager
from verl_like.rollout.client import RolloutClient
from verl_like.rollout.rollout_engine import Sampled

PASSES_WITHOUT_BOUND = 10  # max_num_gen_batches=0: a step that has seen all prompts ten times will not fill up
_LOOK_S = 0.05  # between two looks at what the replicas have to do


@dataclass(slots=True, eq=False)
class _Flight:
    """One group under way."""

    prompt: Prompt
    collection: Collection
    task: asyncio.Task[Group]


@dataclass(slots=True)
class _Period:
    """Events since the last batch, counted for the metrics of the next one."""

    began: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0  # for batches
    dropped: list[Group] = field(default_factory=list)  # judged useless
    stale_groups: int = 0
    stale_tokens: int = 0


class Source:
    """Begins groups, keeps them going, and gives each step those that it trains; owns the ledger of prompts.

    total_steps: of the run: no group is begun that no step is left for; None: not known. Coroutines run in the event
    loop of the episodes; so does everything else, except the constructor, `skip` and `load_state_dict` before the first
    step, and `judge_wave`, which is called when nothing is under way.
    """

    def __init__(
        self,
        config: PPOConfig,
        loader: PromptLoader,
        rewards: RewardManager,
        how: Answering,
        *,
        total_steps: int | None = None,
    ) -> None:
        self._config, self._loader, self._how = config, loader, how
        self.across_steps, self._total_steps = config.asynchronous, total_steps
        self._never_pauses = config.trainer.mode == "separate_async"  # what a batch leaves free is begun at once
        self._extra = config.actor_rollout_ref.rollout.scheduler.additional_prompts
        rules = config.algorithm.filter_groups
        self._judge = Judge(config, rewards, how.policies) if rules.enable and rules.resample else None
        together = not rewards.grades_alone or how.grade_at_end or loader.learns
        self._in_waves = self._judge is not None and not self.across_steps and together
        self._order: Order = self._ages() if self.across_steps else self._selection()
        self._flights: dict[int, _Flight] = {}  # by group, of all that is begun and neither taken nor used up
        self._taken: list[_Flight] = []  # by a step that is not trained yet
        self._last: list[Prompt] = []  # of the last batch
        self._landed: list[_Flight] = []  # in this pass of the event loop
        self._begins = False
        self._wake = asyncio.Event()
        self._error: BaseException | None = None
        self._collecting: Collection | None = None  # of a step that ends all that it began
        self._collection_of_its_own: Callable[[], Collection] | None = None  # for a group that lives across steps
        self.client: RolloutClient | None = None  # that samples, from the first step on
        self._draws_before = 0  # this step; what was drawn then and comes again is overdue
        self._idle, self._watching = IdleClock(paused_too=self._never_pauses), None
        self._period = _Period()
        self._partials: ByGroup = {}  # of a checkpoint, not begun again yet
        self.version: int | None = None  # of the weights; None: not known
        self.metrics: dict[str, float] = {}  # of the period that ended with the last batch
        self.ledger = Ledger()

    async def begin_step(self, step: int) -> None:
        """Get ready for this step's batch; `take` follows."""
        if self._judge is not None:
            self._judge.step = step
        if not isinstance(self._order, Book):
            self._order, self._flights, self._error = self._selection(), {}, None
            self._draws_before = self._loader.draws
            self._begin_period()
        elif self._total_steps is not None:
            self._order.needed = (self._total_steps - step + 1) * self._order.wanted

    async def take(self, collection: Collection) -> list[Group]:
        """Wait for the groups that this step trains, in their order; empty when a wave has ended: see `judge_wave`.

        Raises what an episode raises, RewardError, and ValueError where dynamic sampling finds too few groups.
        """
        came, self.client = time.monotonic(), collection.client
        if self.across_steps:
            parts = (collection.how, collection.client, collection.rewards, collection.arrivals)
            self._collection_of_its_own = partial(Collection, *parts)
            self._watching = self._watching or asyncio.ensure_future(self._watch(collection.client))
            await self._drop_old()
        else:
            self._collecting = collection
        self._begins = True
        try:
            self._begin()
            while (batch := self._batch()) is None and not self._wave_has_ended():
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._begins = self._never_pauses
            if not self.across_steps:
                await collection.end(flight.task for flight in self._flights.values())
        self._period.waited_s += time.monotonic() - came
        return [] if batch is None else self._finish(batch)

    def judge_wave(self) -> list[Group]:
        """Score and judge the groups of a wave together, with the replicas closed; the batch, if that fills it."""
        assert self._judge is not None
        wave = [group for flight in self._flights.values() if (group := flight.task.result()).scores is None]
        self._judge.score(wave)
        for group in wave:
            self._place(group)
        batch = self._batch()
        return [] if batch is None else self._finish(batch)

    def skip(self) -> None:
        """Use up a batch of prompts that somebody else has the answers to."""
        self._last = self._loader.draw()
        self.ledger.used += len(self._last)

    async def feedback(self, rollouts: Rollouts, scores: Scores) -> dict[str, float]:
        """Tell a sampler that learns what became of the last batch, a row a response, and return what it says."""
        self._loader.feedback(rollouts, scores)
        for prompt in self._last:
            self._loader.judged(prompt, scores.select(rollouts.group_B == prompt.group))
        return self._loader.metrics()

    async def trained(self) -> None:
        """Count the last batch as used: it is in the weights, and no longer part of what a resumed run does again."""
        self.ledger.used += len(self._taken)
        self._taken = []

    async def weights_changed(self, version: int) -> None:
        """Begin groups under these weights from now on."""
        self.version = version
        if isinstance(self._order, Book):
            self._order.trained()
        self._begin()

    async def state(self) -> dict[str, Any]:
        """Give the loader's state, to which every group that is not trained goes back under its number, and the
        ledger."""
        state = self._loader.state_dict()
        again = [[flight.prompt.position, flight.prompt.group] for flight in self.under_way()]
        state["returned"] = sorted([*state["returned"], *again], key=lambda pair: pair[1])
        return {**state, "ledger": self.ledger.state_dict()}

    async def tokens(self, running: Mapping[str, Sampled]) -> ByGroup:
        """Collect what is sampled of the groups that are not trained. running: the client's snapshot."""
        if not isinstance(self._how.runner, SingleTurn):
            return {}
        of_flights = {f.prompt.group: partial_responses.of(f.collection, running) for f in self.under_way()}
        return self._partials | {name: samples for name, samples in of_flights.items() if samples}

    def load_state_dict(self, state: dict[str, Any], folder: Path | None = None) -> None:
        """Go on with the very next prompt; of groups under way, from the tokens in `folder`. ValueError if the data set
        changed."""
        self._loader.load_state_dict(state)
        self.ledger = Ledger.of(state.get("ledger"), num_gone=self._loader.draws - self._loader.num_waiting)
        if self.across_steps and folder is not None:
            self._partials = partial_responses.read(folder)

    async def end(self) -> None:
        """Begin nothing any more."""
        self._begins = False
        if self._watching is not None:
            self._watching.cancel()

    def under_way(self) -> list[_Flight]:
        """List the groups that are begun and not trained."""
        return [*self._taken, *self._flights.values()]

    def _selection(self) -> Selection:
        """Make the order of one step that begins with nothing."""
        wanted, num_extra = self._config.data.train_batch_size, self._extra.max if self._extra.enable else 0
        rules = self._config.algorithm.filter_groups
        draw = wanted if self._judge is None else self._judge.per_draw
        in_flight, passes = prompts_in_flight(self._config), PASSES_WITHOUT_BOUND * max(self._loader.steps_per_epoch, 1)
        limits = Limits(
            wanted=wanted,
            in_flight=in_flight,
            most=max(draw * (rules.max_num_gen_batches or passes), in_flight if num_extra else 0),
            extra=num_extra,
            expected=min(1.0, wanted / draw),
            wave=draw if self._in_waves else 0,
        )
        return (CompletionOrder if self._extra.enable else DrawOrder)(limits)

    def _ages(self) -> Book:
        """Make the order of groups that live across steps."""
        settings, rules = self._config.async_training, self._config.algorithm.filter_groups
        wanted = self._config.data.train_batch_size
        each = self._how.num_begun + self._how.greedy_too
        passes = PASSES_WITHOUT_BOUND * max(self._loader.steps_per_epoch, 1)
        room = Room(
            groups=settings.groups_under_way(wanted),
            responses=prompts_in_flight(self._config) * each,
            each=each,
            judged=math.inf if self._judge is None else self._judge.per_draw * (rules.max_num_gen_batches or passes),
        )
        return Book(wanted, settings.max_staleness, waits=settings.beyond == "wait", room=room)

    def _batch(self) -> list[int] | None:
        """Name the groups that this step trains, when they are there."""
        if self._error is not None:
            raise self._error
        batch = self._order.batch(self.version or 0)
        if batch is None and self._judge is not None and self._order.exhausted():
            self._judge.require_enough()
            raise RunStopped(self._judge.gave_up())
        return batch

    def _wave_has_ended(self) -> bool:
        return self._in_waves and all(flight.task.done() for flight in self._flights.values())

    def _finish(self, batch: Sequence[int]) -> list[Group]:
        """End the period with this batch: what becomes of its groups, and of the others."""
        flights = [self._flights.pop(name) for name in batch]
        groups = [flight.task.result() for flight in flights]
        self._last = [flight.prompt for flight in flights]
        if isinstance(self._order, Book):
            self._taken = flights
            self._order.train(batch)
            self._begin()
        if self._judge is not None:  # of the same groups whatever ended when
            self._judge.report([*groups, *self._period.dropped])
        if isinstance(self._order, Book):
            self.metrics = self._async_metrics(self._order)
        else:
            self.ledger.used += len(groups)
            num_unused = self._leave_the_rest()
            self.metrics = self._step_metrics(groups, num_unused)
            self._collecting = None  # and with it the tokens of all that was begun
        self._begin_period()
        return groups

    def _leave_the_rest(self) -> int:
        """Give what the step has begun and does not need back to the data, or give it up; return how many groups."""
        unused, self._flights = [flight.prompt for flight in self._flights.values()], {}
        if not self._extra.enable or self._extra.aborted == "wait":
            self._loader.give_back(unused)
        else:
            self.ledger.aborted += len(unused)
        return len(unused)

    def _begin_period(self) -> None:
        """Count anew what the metrics of the next batch tell; `_finish` calls it, and no reader of them."""
        self._period = _Period()
        self._idle.restart()
        if self._judge is not None:
            self._judge.begin(self._judge.step)

    def _async_metrics(self, book: Book) -> dict[str, float]:
        """async/*: groups under way, those of them that have ended; groups and tokens dropped as stale; see IdleClock.
        trainer_waited: share of the period's time, for batches. filter_groups/*: of all groups judged in it."""
        period = self._period
        found = {
            "async/running_groups": float(len(book.running)),
            "async/ended_groups": float(len(book.ended)),
            "async/dropped_groups": float(period.stale_groups),
            "async/dropped_tokens": float(period.stale_tokens),
            "async/trainer_waited": period.waited_s / ((time.monotonic() - period.began) or 1.0),
            **self._idle.shares(),
        }
        return found if self._judge is None else found | self._filter_metrics(self._judge, self._judge.seen)

    def _step_metrics(self, groups: Sequence[Group], num_unused: int) -> dict[str, float]:
        """scheduler/*, which depends on time: on what had begun when the batch was full. filter_groups/*: of the groups
        up to there alone."""
        if not draws_until_full(self._config):
            return {}
        found = {"scheduler/num_unused": float(num_unused)}
        if not self._in_waves:
            assert self._collecting is not None
            used = [member.episode.num_sampled for group in groups for member in group.sampled]
            begun = self._collecting.sampled_tokens()
            found["scheduler/unused_tokens"] = float(sum(begun) - sum(used))
            if self._extra.enable:  # aborted ones would be longer yet
                found["scheduler/response_length/used"] = sum(used) / max(len(used), 1)
                found["scheduler/response_length/begun"] = sum(begun) / max(len(begun), 1)
        if self._judge is None:
            return found
        judged = [group.scores for group in (*groups, *self._period.dropped) if group.scores is not None]
        return found | self._filter_metrics(self._judge, judged)

    def _filter_metrics(self, judge: Judge, judged: Sequence[Scores]) -> dict[str, float]:
        dropped = len(self._period.dropped)
        return filter_metrics(judged, num_judged=len(judged), num_dropped=dropped, per_draw=judge.per_draw)

    def _begin(self) -> None:
        """Begin as many groups as the order admits, while that is wanted."""
        if self._begins and self._error is None and (count := self._order.admits()):
            for prompt in self._loader.draw(count):
                self._launch(prompt)

    def _launch(self, prompt: Prompt) -> None:
        name, collection, began = prompt.group, self._collecting, self.version or 0
        if collection is None:
            assert self._collection_of_its_own is not None
            collection = self._collection_of_its_own()
            collection.on_end, collection.partials = partial(self._response_ended, name), self._partials.pop(name, {})
            first = [int(one.weight_versions.min()) for one in collection.partials.values() if len(one)]
            began = min(first, default=began)
        self._order.begin(name, began, overdue=name < self._draws_before)
        flight = _Flight(prompt, collection, asyncio.ensure_future(self._fly(prompt, collection)))
        flight.task.add_done_callback(partial(self._on_landing, flight))
        self._flights[name] = flight

    async def _fly(self, prompt: Prompt, collection: Collection) -> Group:
        """Answer one prompt, from the first request to the scores where the group is judged by them."""
        group = await collection.group(prompt)
        self._order.sampled(prompt.group)  # also what ran in vain
        if self._judge is not None and not self._in_waves:
            await self._judge.graded(collection, group)
        return group

    def _on_landing(self, flight: _Flight, task: asyncio.Task[Group]) -> None:
        if flight.collection.ended:
            return  # it was given up
        if not self._landed:
            asyncio.get_running_loop().call_soon(self._land)
        self._landed.append(flight)

    def _land(self) -> None:
        """Take in the groups that ended in one pass of the event loop, in the order of their draws, and begin others in
        their place. What goes wrong is the step's error: nobody else would hear of it."""
        landed, self._landed = sorted(self._landed, key=lambda flight: flight.prompt.group), []
        for act in (*(partial(self._take_in, flight) for flight in landed), self._begin):
            try:
                act()
            except Exception as error:
                self._error = self._error or error
        self._wake.set()

    def _take_in(self, flight: _Flight) -> None:
        if not flight.collection.ended and not flight.task.cancelled():
            group = flight.task.result()
            if not self._in_waves:
                self._place(group)

    def _place(self, group: Group) -> None:
        """Tell the order whether the group is of use; groups that are used up leave."""
        self._order.end(group.prompt.group, kept=self._judge is None or self._judge.keeps(group))
        for name in self._order.dropped()[len(self._period.dropped) :]:
            self._period.dropped.append(useless := self._flights.pop(name).task.result())
            self.ledger.dropped += 1
            if useless.scores is not None:
                self._loader.judged(useless.prompt, useless.scores)

    def _response_ended(self, group: int) -> None:
        """Begin others, unless the group was given up before, and its places are free already."""
        if self._order.sampled(group, 1):
            self._begin()

    async def _drop_old(self) -> None:
        """async_training.beyond=drop: end the groups that are too old for this step."""
        if not isinstance(self._order, Book) or self._config.async_training.beyond != "drop":
            return
        old = [self._flights.pop(name) for name in self._order.too_old(self.version or 0)]
        for flight in old:
            self._order.forget(flight.prompt.group)
        await asyncio.gather(*(flight.collection.end([flight.task]) for flight in old))
        self._period.stale_groups += len(old)
        self._period.stale_tokens += sum(sum(flight.collection.sampled_tokens()) for flight in old)
        self.ledger.stale += len(old)

    async def _watch(self, client: RolloutClient) -> None:
        while isinstance(self._order, Book):
            seen = client.occupancy()
            self._idle.look(seen, self._order.why_idle(seen.pending))
            await asyncio.sleep(_LOOK_S)
