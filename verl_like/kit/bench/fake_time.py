"""Engine with fake time: no model, no waiting, the same tokens in every run. Hours of decoding pass in seconds.

For tests of what stands around an engine (asynchronous training, agents, routing, operations). Tokens are a pure
function of (seed, position), so that any completion can be checked; a clock moves with each step by what a real one
would take.

- FakeTimeEngine alone: `add`, `step`, `drop`; `now` is the time in seconds.
- FakeTimeRollout: the same as a whole RolloutEngine with a step thread; time is that of its own steps.
- SimulatedLink: many of them behind a Router, without any thread, a discrete-event simulation of the sampling side.

Each step of a simulated engine is an event of one clock; tests put others there (a tool's answer, a power cut):

    clock = VirtualClock()
    links = [SimulatedLink(f"replica {i}", FakeTimeEngine(), clock) for i in range(4)]
    router = Router(links, max_running_requests=64)
    future = router.submit(request)
    clock.at(30.0, lambda: links[0].kill("power cut"))
    clock.run()  # future is done; clock.now: seconds it took
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl_like.rollout.base import SteppedRolloutEngine
from verl_like.rollout.client import Events
from verl_like.rollout.orders import Lockstep
from verl_like.rollout.rollout_engine import Completion, FinishReason, GenerationRequest, HeldWeights, Sampled
from verl_like.rollout.step_loop import StepLoop

VOCAB_SIZE = 32_000
DECODE_S = {1: 0.006, 64: 0.009, 256: 0.016}  # about those of a model of 1.5B parameters on one large GPU


def tokens_of(seed: int, stop: int, start: int = 0) -> NDArray[np.int32]:
    """Tokens start..stop of the response with this seed: int32, below VOCAB_SIZE."""
    mixed = np.arange(start, stop, dtype=np.uint64) + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return ((mixed >> np.uint64(31)) % np.uint64(VOCAB_SIZE)).astype(np.int32)


def seed_of(request: GenerationRequest) -> int:
    """Seed of a request; without one, a number made of its id."""
    return zlib.crc32(request.request_id.encode()) if request.seed is None else request.seed


def long_tailed(request: GenerationRequest) -> int:
    """Draw a length from the request's seed: log-normal, half of them under 200 tokens, 1 in 100 over 2,000."""
    return 1 + int(random.Random(seed_of(request)).lognormvariate(math.log(200), 1.0))


@dataclass(slots=True, eq=False)
class _Row:
    request: GenerationRequest
    length: int  # of the whole response
    first_step: int = 0
    cached: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)  # (tokens sampled here before, version since)


class FakeTimeEngine:
    """SteppedEngine of counters; see the module. Requests are taken up by (priority, arrival).

    Args:
        decode_s: seconds of one decode step with so many responses, linear between.
        prefill_s: seconds of one token that is not in the cache, which keeps the tokens of sessions until the next
            load.
        length_of: tokens of a request's whole response; it ends there with "stop", or earlier at max_tokens.
        steps_per_call: `step` makes up to so many decode steps, and ends with the first response that does: faster,
            while added requests wait longer.
        failure: raised by the next step.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int = 256,
        decode_s: Mapping[int, float] = DECODE_S,
        prefill_s: float = 2e-5,
        length_of: Callable[[GenerationRequest], int] = long_tailed,
        max_model_len: int = 2**20,
        steps_per_call: int = 1,
        version: int | None = 0,
    ) -> None:
        self.weight_version = version
        self.max_num_seqs, self.max_model_len, self.steps_per_call = max_num_seqs, max_model_len, steps_per_call
        self.failure: Exception | None = None
        self.now = 0.0
        self.num_steps = self.num_sampled = self.num_prefilled = self.most_running = 0
        sizes, seconds = zip(*sorted(decode_s.items()), strict=True)
        self._decode_s = functools.cache(lambda running: float(np.interp(running, sizes, seconds)))
        self._prefill_s, self._length_of = prefill_s, length_of
        self._arrivals = itertools.count()
        self._waiting: list[tuple[int, int, _Row]] = []  # heap of (priority, arrival)
        self._ends: list[tuple[int, int, _Row]] = []  # heap of (step after which it ends, arrival)
        self._pending: dict[str, _Row] = {}
        self._running: dict[str, _Row] = {}
        self._cache: dict[str, int] = {}  # session -> tokens
        self._to_prefill = 0

    def add(self, request: GenerationRequest) -> None:
        if len(request.prompt_ids) + request.sampling.max_tokens > self.max_model_len:
            raise ValueError(f"request {request.request_id} does not fit max_model_len={self.max_model_len}")
        length = min(request.sampling.max_tokens, max(len(request.resume) + 1, self._length_of(request)))
        row = self._pending[request.request_id] = _Row(request, length)
        heappush(self._waiting, (request.priority, next(self._arrivals), row))

    def step(self) -> list[Completion]:
        if self.failure is not None:
            raise self.failure
        self._take_up()
        while self._running.get(self._ends[0][2].request.request_id) is not self._ends[0][2]:
            heappop(self._ends)  # dropped before
        steps = min(self.steps_per_call, self._ends[0][0] - self.num_steps)
        self.now += steps * self._decode_s(len(self._running)) + self._to_prefill * self._prefill_s
        self.num_steps += steps
        self.num_sampled += steps * len(self._running)
        self.num_prefilled += self._to_prefill
        self._to_prefill = 0
        ended = []
        while self._ends and self._ends[0][0] <= self.num_steps:
            row = heappop(self._ends)[2]
            if self._running.get(row.request.request_id) is row:
                ended.append(self._end(row, "stop" if row.length < row.request.sampling.max_tokens else "length"))
        return ended

    def has_unfinished(self) -> bool:
        return bool(self._pending)

    def drop(self, request_ids: Sequence[str]) -> list[Completion]:
        return [self._end(self._pending[i], "abort") for i in request_ids if i in self._pending]

    def progress(self) -> dict[str, Sampled]:
        return {i: self._sampled(row) for i, row in self._pending.items()}

    def load(self, version: int) -> None:
        """Load other weights: the cache is emptied, and requests under way go on with them after another prefill."""
        self.weight_version = version
        self._cache = {}
        self._to_prefill = 0
        for row in self._running.values():
            row.versions.append((self._count(row), version))
            self._to_prefill += self._context(row)

    def _take_up(self) -> None:
        while self._waiting and len(self._running) < self.max_num_seqs:
            _, arrival, row = heappop(self._waiting)
            request = row.request
            if self._pending.get(request.request_id) is not row:
                continue  # dropped
            assert self.weight_version is not None, "no weights"
            row.first_step, row.versions = self.num_steps, [(0, self.weight_version)]
            context = self._context(row)
            row.cached = min(self._cache.get(request.session or "", 0), context - 1)
            self._to_prefill += context - row.cached
            self._remember(row)
            self._running[request.request_id] = row
            heappush(self._ends, (self.num_steps + row.length - len(request.resume), arrival, row))
        self.most_running = max(self.most_running, len(self._running))

    def _count(self, row: _Row) -> int:
        """Count the tokens of a row that were sampled here."""
        return self.num_steps - row.first_step if row.versions else 0

    def _context(self, row: _Row) -> int:
        return len(row.request.prompt_ids) + len(row.request.resume) + self._count(row)

    def _remember(self, row: _Row) -> None:
        session = row.request.session
        if session is not None:
            self._cache[session] = max(self._cache.get(session, 0), self._context(row))

    def _sampled(self, row: _Row) -> Sampled:
        begun, count = len(row.request.resume), self._count(row)
        token_ids = tokens_of(seed_of(row.request), begun + count, begun)
        starts = [start for start, _ in row.versions]
        versions = np.repeat([v for _, v in row.versions], np.diff([*starts, count])) if count else token_ids
        log_probs = (-1 - token_ids / VOCAB_SIZE).astype(np.float32)
        new = Sampled(token_ids=token_ids, log_probs=log_probs, weight_versions=versions.astype(np.int32))
        return row.request.resume + new

    def _end(self, row: _Row, reason: FinishReason) -> Completion:
        name, sampled = row.request.request_id, self._sampled(row)
        if self._running.pop(name, None) is not None:
            self._remember(row)
        del self._pending[name]
        return Completion(request_id=name, sampled=sampled, finish_reason=reason, cached_tokens=row.cached)


class FakeTimeRollout(SteppedRolloutEngine):
    """RolloutEngine around the engine `fake`; `load_weights` takes any stream."""

    def __init__(self, fake: FakeTimeEngine, *, lockstep: Lockstep | None = None) -> None:
        length = fake.max_model_len
        super().__init__(
            dtype=torch.float32, tokenizer_size=VOCAB_SIZE, vocab_size=VOCAB_SIZE, max_model_len=length, seed=0
        )
        self.fake = fake
        if fake.weight_version is not None:
            self._in_memory, self._unloaded = HeldWeights(version=fake.weight_version), False
        self._loop = StepLoop(fake, device=torch.device("cpu"), lockstep=lockstep)

    def _load(self, stream: Iterator[tuple[str, Tensor]], *, partial: bool) -> None:
        for _ in stream:
            pass

    def _weights_changed(self) -> None:
        self.fake.load(self._sampling_version)


class VirtualClock:
    """Clock whose seconds pass as events happen, each at its time; at equal times, in the order they were put in."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` at this time, or now if it has passed."""
        heappush(self._events, (max(time_s, self.now), next(self._order), action))

    def step(self) -> bool:
        """Let the next event happen. False if none is left."""
        if self._events:
            self.now, _, action = heappop(self._events)
            action()
            return True
        return False

    def run(self, until_s: float = math.inf) -> None:
        """Let events happen until that time, or until none is left."""
        while self._events and self._events[0][0] <= until_s:
            self.step()
        if until_s < math.inf:
            self.now = max(self.now, until_s)


class SimulatedLink:
    """Link to an engine whose steps are events of a clock. Futures are resolved inside `VirtualClock.run`."""

    def __init__(self, name: str, engine: FakeTimeEngine, clock: VirtualClock) -> None:
        self.name, self.engine = name, engine
        self._clock = clock
        self._on_events: Callable[[Events], None] = lambda events: None
        self._stepping = self._paused = self._dead = False

    def start(self, on_events: Callable[[Events], None]) -> None:
        self._on_events = on_events

    def send(self, add: Sequence[GenerationRequest], abort: Sequence[str]) -> None:
        if self._dead:
            return
        refusals: list[tuple[str, Exception]] = []
        for request in add:
            try:
                self.engine.add(request)
            except ValueError as error:
                refusals.append((request.request_id, error))
        self._tell(Events(completions=self.engine.drop(abort), refusals=refusals))
        self._go()

    def snapshot(self) -> dict[str, Sampled]:
        return {} if self._dead else self.engine.progress()

    def close(self) -> None:
        self._on_events = lambda events: None

    def pause(self) -> None:
        """Pause the engine: no step begins after the one under way."""
        self._paused = True

    def open(self) -> None:
        self._paused = False
        self._go()

    def kill(self, why: str) -> None:
        """Kill the replica, with what it was doing. A step that raises does the same."""
        self._tell(Events(death=why))
        self._dead = True

    def _go(self) -> None:
        if not (self._stepping or self._paused or self._dead) and self.engine.has_unfinished():
            self._stepping = True
            self._clock.at(self._clock.now, self._step)  # with all that is sent at this time

    def _step(self) -> None:
        if self._paused or self._dead or not self.engine.has_unfinished():
            self._stepping = False
            return
        self.engine.now = max(self.engine.now, self._clock.now)
        try:
            done = self.engine.step()
        except Exception as error:
            self.kill(f"{type(error).__name__}: {error}")
            return
        self._clock.at(self.engine.now, lambda: self._arrive(done))

    def _arrive(self, done: list[Completion]) -> None:
        self._stepping = False
        if not self._dead:
            self._tell(Events(completions=done))
            self._go()

    def _tell(self, events: Events) -> None:
        if events.completions or events.refusals or events.death:
            self._clock.at(self._clock.now, lambda: self._on_events(events))
