"""Replicas with fake time behind a Router, in one thread: a discrete-event simulation of the sampling side.

Each step of an engine is an event of one clock; tests put others there (a tool's answer, a weight sync, a power cut):

    clock = VirtualClock()
    links = [SimulatedLink(f"replica {i}", FakeTimeEngine(), clock) for i in range(4)]
    router = Router(links, max_running_requests=64)
    future = router.submit(request)
    clock.at(30.0, lambda: links[0].kill("power cut"))
    clock.run()  # future is done; clock.now: seconds it took
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from verl_like.rollout.client import Events
from verl_like.rollout.fake_time import FakeTimeEngine
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, Sampled


class VirtualClock:
    """Seconds that pass as things happen, each at its time; of the same time, in the order they were put in."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` at this time, or now if it has passed."""
        heappush(self._events, (max(time_s, self.now), next(self._order), action))

    def step(self) -> bool:
        """Let the next thing happen. False if nothing is left."""
        if self._events:
            self.now, _, action = heappop(self._events)
            action()
            return True
        return False

    def run(self, until_s: float = math.inf) -> None:
        """Until that time, or until nothing is left to happen."""
        while self._events and self._events[0][0] <= until_s:
            self.step()
        if until_s < math.inf:
            self.now = max(self.now, until_s)


class SimulatedLink:
    """A Link to an engine whose steps are events of a clock. Futures are resolved inside `VirtualClock.run`."""

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
        """No step begins after the one under way."""
        self._paused = True

    def open(self) -> None:
        self._paused = False
        self._go()

    def kill(self, why: str) -> None:
        """The replica is gone, with what it was doing. A step that raises does the same."""
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
