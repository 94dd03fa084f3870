"""Submit, abort, pause, load, open and kill in every order, on router, links, step loops and engines with fake time.

Two fleets go through the same rules: one whose replicas are events of one clock (exact, and fast), one of step loops in
threads, with 1 to 3 ranks each. What must hold is the same for both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.unit.rollout.wire import LIMIT_S, Network, Wire
from verl_like.kit.bench.fake_time import FakeTimeEngine, SimulatedLink, VirtualClock, tokens_of
from verl_like.rollout.client import LocalLink
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError, SamplingParams
from verl_like.rollout.router import Router
from verl_like.rollout.step_loop import StepLoop

ENDLESS = 10**7
CAPACITY = 3


class Engine(FakeTimeEngine):
    """Notes what must never happen. `others`: requests that run on other replicas."""

    def __init__(self, leads: bool, violations: list[str], *, pace_s: float = 0.0) -> None:
        super().__init__(decode_s={1: 0.01}, length_of=lambda request: 10**9, max_model_len=10**8)
        self.leads, self.violations, self.pace_s = leads, violations, pace_s
        self.others: Callable[[], set[str]] = set

    def add(self, request: GenerationRequest) -> None:
        super().add(request)
        if self.leads and request.request_id in self.others():
            self.violations.append(f"{request.request_id} is on two replicas")
        if len(self._pending) > CAPACITY:
            self.violations.append(f"{len(self._pending)} requests on one replica")

    def step(self) -> list[Completion]:
        if self.pace_s:
            time.sleep(self.pace_s)
        return super().step()


class SimulatedFleet:
    """Replicas on one clock."""

    def __init__(self, ranks: Sequence[int], violations: list[str], options: dict[str, bool]) -> None:
        self.clock = VirtualClock()
        self.engines = [[Engine(True, violations)] for _ in ranks]
        self.links = [SimulatedLink(f"{i}", each[0], self.clock) for i, each in enumerate(self.engines)]
        self.alive = [True for _ in ranks]
        _tell_of_each_other(self)
        self.router = Router(self.links, max_running_requests=CAPACITY, **options)  # type: ignore[arg-type]

    def open(self, i: int) -> None:
        self.links[i].open()

    def pause(self, i: int) -> None:
        self.links[i].pause()
        self.work()

    def load(self, i: int, version: int) -> None:
        self.engines[i][0].load(version)

    def kill(self, i: int) -> None:
        self.alive[i] = False
        self.links[i].kill("killed")

    def work(self) -> None:
        self.clock.run(self.clock.now + 0.055)

    def settle(self, futures: Sequence[Future[Completion]]) -> None:
        self.clock.run()

    def close(self) -> None:
        self.router.close()


class ThreadedFleet:
    """Replicas of step loops, a thread and an engine for each rank."""

    def __init__(self, ranks: Sequence[int], violations: list[str], options: dict[str, bool]) -> None:
        self.engines = [[Engine(rank == 0, violations, pace_s=1e-4) for rank in range(size)] for size in ranks]
        self.loops: list[list[StepLoop]] = []
        for engines in self.engines:
            network = Network(len(engines))
            wires = [Wire(network, rank) if len(engines) > 1 else None for rank in range(len(engines))]
            self.loops.append(
                [
                    StepLoop(engine, device=torch.device("cpu"), lockstep=wire)  # type: ignore[arg-type]
                    for engine, wire in zip(engines, wires, strict=True)
                ]
            )
        self.alive = [True for _ in ranks]
        _tell_of_each_other(self)
        self._threads = ThreadPoolExecutor(3)
        self.links = [LocalLink(f"{i}", loops[0], interval_s=0.0005) for i, loops in enumerate(self.loops)]
        self.router = Router(self.links, max_running_requests=CAPACITY, **options)  # type: ignore[arg-type]

    def open(self, i: int) -> None:
        self._on_all(i, StepLoop.open)

    def pause(self, i: int) -> None:
        self._on_all(i, StepLoop.pause)

    def load(self, i: int, version: int) -> None:
        for loop, engine in zip(self.loops[i], self.engines[i], strict=True):
            with loop.exclusive():
                engine.load(version)

    def kill(self, i: int) -> None:
        self._on_all(i, StepLoop.close)
        self.alive[i] = False

    def _on_all(self, i: int, what: Callable[[StepLoop], None]) -> None:
        calls = [self._threads.submit(what, loop) for loop in self.loops[i]]
        assert not wait_for(calls, LIMIT_S).not_done
        for call in calls:
            call.result()

    def work(self) -> None:
        time.sleep(0.003)

    def settle(self, futures: Sequence[Future[Completion]]) -> None:
        wait_for(futures, LIMIT_S)

    def close(self) -> None:
        self.router.close()
        for i in range(len(self.loops)):
            self._on_all(i, StepLoop.close)
        self._threads.shutdown()
        assert not any(loop._thread.is_alive() for loops in self.loops for loop in loops)
        assert not any(link._thread.is_alive() for link in self.links)


def _tell_of_each_other(fleet: SimulatedFleet | ThreadedFleet) -> None:
    def others(i: int) -> set[str]:
        mine = [j for j in range(len(fleet.engines)) if j != i and _lives(fleet, j)]
        return {name for j in mine for name in list(fleet.engines[j][0]._pending)}

    for i, engines in enumerate(fleet.engines):
        engines[0].others = lambda i=i: others(i)  # type: ignore[misc]


def _lives(fleet: SimulatedFleet | ThreadedFleet, i: int) -> bool:
    if isinstance(fleet, ThreadedFleet):
        return fleet.loops[i][0]._error is None  # set before anybody can hear of it
    return fleet.alive[i]


class Sampling(RuleBasedStateMachine):
    """The rules, and what must hold between them."""

    make_fleet: type[SimulatedFleet | ThreadedFleet]
    names = Bundle("names")

    @initialize(
        ranks=st.lists(st.integers(1, 3), min_size=1, max_size=3), requeue=st.booleans(), deterministic=st.booleans()
    )
    def start(self, ranks: list[int], requeue: bool, deterministic: bool) -> None:
        self.violations: list[str] = []
        self.fleet = self.make_fleet(ranks, self.violations, {"requeue": requeue, "deterministic": deterministic})
        self.is_paused = [True for _ in ranks]
        self.version, self.count, self.kills = 0, 0, 0
        self.requeue = requeue
        self.futures: dict[str, Future[Completion]] = {}
        self.limits: dict[str, int] = {}
        self.num_ends: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.checked: set[str] = set()
        self.steps_when_paused: dict[int, list[int]] = {}

    @property
    def live(self) -> list[int]:
        return [i for i, alive in enumerate(self.fleet.alive) if alive]

    @rule(
        target=names,
        tokens=st.sampled_from([1, 3, 20, ENDLESS]),
        priority=st.integers(0, 2),
        session=st.sampled_from([None, None, "a", "b"]),
        count=st.integers(1, 4),
    )
    def submit(self, tokens: int, priority: int, session: str | None, count: int) -> object:
        names = [f"r{self.count + 1 + i}" for i in range(count)]
        for name in names:
            self.count += 1
            asked = GenerationRequest(
                request_id=name,
                prompt_ids=[1, 2],
                sampling=SamplingParams(max_tokens=tokens),
                seed=self.count,
                session=session,
                priority=priority,
            )
            try:
                future = self.fleet.router.submit(asked)
            except RolloutError:
                assert not self.live
                continue  # the name is known to later rules all the same: they must not depend on time
            self.num_ends[name] = 0
            future.add_done_callback(lambda _, name=name: self._ended(name))  # type: ignore[misc]
            self.futures[name], self.limits[name] = future, tokens
        return multiple(*names)

    def _ended(self, name: str) -> None:
        self.num_ends[name] += 1

    @rule(name=names)
    def abort(self, name: str) -> None:
        self.aborted.add(name)
        self.fleet.router.abort([name, "nobody"])

    @rule()
    def abort_all(self) -> None:
        self.aborted |= set(self.futures)
        self.fleet.router.abort()

    @rule(number=st.integers(0, 2), hold=st.booleans())
    def pause(self, number: int, hold: bool) -> None:
        if number in self.live:
            if hold:
                self.fleet.router.hold(str(number))
            self.fleet.pause(number)
            self.is_paused[number] = True
            self.steps_when_paused[number] = [engine.num_steps for engine in self.fleet.engines[number]]

    @rule(number=st.integers(0, 2))
    def open(self, number: int) -> None:
        if number in self.live:
            self._open(number)

    def _open(self, number: int) -> None:
        self.steps_when_paused.pop(number, None)
        self.is_paused[number] = False
        self.fleet.open(number)
        self.fleet.router.release(str(number))

    @precondition(lambda self: all(self.is_paused[i] for i in self.live))
    @rule()
    def load(self) -> None:
        self.version += 1
        for i in self.live:
            self.fleet.load(i, self.version)

    @precondition(lambda self: self.kills < 2)
    @rule(number=st.integers(0, 2))
    def kill(self, number: int) -> None:
        if number in self.live:
            self.kills += 1
            self.fleet.kill(number)
            self.steps_when_paused.pop(number, None)

    @rule()
    def work(self) -> None:
        self.fleet.work()

    @rule()
    def look(self) -> None:
        for name, sampled in self.fleet.router.snapshot().items():
            assert sampled.token_ids.tolist() == tokens_of(int(name[1:]), len(sampled)).tolist()

    @invariant()
    def nothing_wrong_happened(self) -> None:
        if hasattr(self, "fleet"):
            assert self.violations == []
            for number, steps in self.steps_when_paused.items():
                assert [engine.num_steps for engine in self.fleet.engines[number]] == steps, (
                    "a step of a paused replica"
                )
                assert len(set(steps)) == 1, "ranks parked between different steps"
            for name, future in list(self.futures.items()):
                if future.done() and name not in self.checked:
                    self.checked.add(name)
                    self._check(name, future)

    def _check(self, name: str, future: Future[Completion]) -> None:
        error = future.exception()
        if error is not None:
            assert isinstance(error, RolloutError) and self.kills, error
            assert not self.requeue or not self.live, error
            return
        completion = future.result()
        assert completion.token_ids == tokens_of(int(name[1:]), len(completion.sampled)).tolist()
        if completion.finish_reason == "abort":
            assert name in self.aborted and len(completion.sampled) <= self.limits[name]
        else:
            assert len(completion.sampled) == self.limits[name]
        versions = completion.sampled.weight_versions.tolist()
        assert versions == sorted(versions) and set(versions) <= set(range(self.version + 1))

    def teardown(self) -> None:
        if not hasattr(self, "fleet"):
            return
        try:
            for i in self.live:
                self._open(i)
            self.fleet.work()
            endless = [name for name, limit in self.limits.items() if limit == ENDLESS]
            self.aborted |= set(endless)
            self.fleet.router.abort(endless)
            self.fleet.settle(list(self.futures.values()))
            late = [name for name, future in self.futures.items() if not future.done()]
            assert not late, f"{late} did not end"
            self.nothing_wrong_happened()
            assert self.fleet.router.snapshot() == {}
            assert (
                not self.live
                or all(replica.load == 0 for replica in self.fleet.router._replicas if replica.alive)
                or (self.fleet.router._deterministic)
            )
        finally:
            self.fleet.close()
        assert set(self.num_ends.values()) <= {1}


@pytest.mark.parametrize(("fleet", "examples"), [(SimulatedFleet, 150), (ThreadedFleet, 60)])
def test_in_every_order(
    fleet: type[SimulatedFleet | ThreadedFleet], examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[object] = []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    machine = type("Machine", (Sampling,), {"make_fleet": fleet})
    exact = fleet is SimulatedFleet  # threads do not run the same way twice, so that nothing can be shrunk
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate, Phase.shrink] if exact else [Phase.generate],
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert not broken
