"""Routing, queues, death and close, on replicas with fake time; then with step loops in threads."""

from __future__ import annotations

import gc
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import pytest

from verl_like import live_metrics
from verl_like.kit.bench.fake_time import FakeTimeEngine, FakeTimeRollout, SimulatedLink, VirtualClock, tokens_of
from verl_like.rollout.client import Events, LocalLink
from verl_like.rollout.rollout_engine import (
    Completion,
    GenerationRequest,
    ResumeError,
    RolloutError,
    Sampled,
    SamplingParams,
)
from verl_like.rollout.router import Router

LIMIT_S = 30.0


def request(i: int, tokens: int = 100, *, prompt: int = 10, **fields: object) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=tokens)
    return GenerationRequest(request_id=f"r{i}", prompt_ids=[1] * prompt, sampling=sampling, seed=i, **fields)  # type: ignore[arg-type]


class Fleet:
    """Replicas on one clock and the router before them. A decode step takes 0.01 s."""

    def __init__(self, count: int, *, capacity: int = 4, speeds: Sequence[float] = (), **options: object) -> None:
        self.clock = VirtualClock()
        self.engines = [
            FakeTimeEngine(
                decode_s={1: speeds[i] if speeds else 0.01},
                length_of=lambda request: 10**9,
                max_model_len=10**6,
                prefill_s=0.0,
            )
            for i in range(count)
        ]
        self.links = [SimulatedLink(f"replica {i}", engine, self.clock) for i, engine in enumerate(self.engines)]
        self.orders: list[list[str]] = [[] for _ in range(count)]
        for engine, orders in zip(self.engines, self.orders, strict=True):
            engine.add = _noting(engine.add, orders)  # type: ignore[method-assign]
        self.router = Router(self.links, max_running_requests=capacity, **options)  # type: ignore[arg-type]

    def at_replicas(self) -> list[list[str]]:
        """Requests under way at each."""
        self.clock.run(self.clock.now)
        return [sorted(engine.progress()) for engine in self.engines]


def _noting(add: Callable[[GenerationRequest], None], orders: list[str]) -> Callable[[GenerationRequest], None]:
    def noted(request: GenerationRequest) -> None:
        add(request)
        orders.append(request.request_id)

    return noted


def right(future: Future[Completion], seed: int, tokens: int = 100) -> bool:
    completion = future.result(0)
    return completion.token_ids == tokens_of(seed, tokens).tolist() and completion.finish_reason == "length"


def replicas(router: Router) -> list[Any]:
    return router._replicas


def entries(router: Router) -> dict[str, Any]:
    """What was submitted and has not ended, by request id."""
    return router._entries


def set_lengths(engine: FakeTimeEngine, length_of: Callable[[GenerationRequest], int]) -> None:
    engine._length_of = length_of


def test_work_is_spread_by_tokens_to_come() -> None:
    fleet = Fleet(2)
    fleet.router.submit(request(0, 1000))
    for i in range(1, 4):
        fleet.router.submit(request(i, 200))
    assert fleet.at_replicas() == [["r0"], ["r1", "r2", "r3"]]
    fleet.clock.run()
    assert [replica.load for replica in replicas(fleet.router)] == [0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_each_goes_to_the_one_that_has_least_to_do_whatever_happened_before(seed: int) -> None:
    """Against a look at all replicas; what the router remembers of their loads does not grow."""
    fleet, dice = Fleet(5, capacity=4), random.Random(seed)
    router, alive = fleet.router, []
    for i in range(600):
        with_place = [r for r in replicas(router) if len(r.running) < 4]
        best = min(with_place, key=lambda r: (r.load, r.number)) if with_place else None
        router.submit(request(i, dice.choice([10, 50, 200])))
        alive.append(f"r{i}")
        found = [r for r in replicas(router) if f"r{i}" in r.running]
        assert found == ([] if best is None else [best])
        what = dice.random()
        if what < 0.5:
            fleet.clock.run(fleet.clock.now + dice.random())
        elif what < 0.6:
            router.snapshot()
        elif what < 0.8 or len(entries(router)) > 18:
            router.abort([alive.pop(dice.randrange(len(alive))) for _ in range(min(3, len(alive)))])
            fleet.clock.run(fleet.clock.now)
        while best is None and len(entries(router)) > router._num_running:
            fleet.clock.run(fleet.clock.now + 0.5)  # somebody waits: `_admit` is tested elsewhere
    assert len(router._loads) <= 4 * 5 + 64


def test_what_is_in_hand_can_be_read_meanwhile() -> None:
    gc.collect()  # routers of other tests
    before = live_metrics.readings().get("router/requests", 0)
    fleet = Fleet(3, capacity=2)
    for i in range(7):
        fleet.router.submit(request(i))
    fleet.router.hold("replica 2")
    now = {name.removeprefix("router/"): value for name, value in fleet.router.gauges().items()}
    assert (now["replicas"], now["replicas_held"], now["replicas_idle"], now["replicas_lost"]) == (3, 1, 0, 0)
    assert (now["requests"], now["requests_running"]) == (7, 6)
    assert live_metrics.readings()["router/requests"] == before + 7
    fleet.router.close()
    assert live_metrics.readings().get("router/requests", 0) == before


def test_what_ended_tells_what_to_expect_of_its_source() -> None:
    fleet = Fleet(2, source_of=lambda request: "short" if len(request.prompt_ids) == 10 else "long")
    for engine in fleet.engines:
        set_lengths(engine, lambda r: 5 if len(r.prompt_ids) == 10 else 500)
    fleet.router.submit(request(0, 1000)), fleet.router.submit(request(1, 1000, prompt=11))
    fleet.clock.run()
    fleet.router.submit(request(2, 1000, prompt=11))
    for i in range(3, 6):
        fleet.router.submit(request(i, 1000))
    assert fleet.at_replicas() == [["r2"], ["r3", "r4", "r5"]]
    assert [replica.load for replica in replicas(fleet.router)] == [511, 45]


def test_a_session_stays_with_its_replica() -> None:
    fleet = Fleet(3, capacity=2)
    for i in range(3):
        fleet.router.submit(request(i, session="a"))
    fleet.router.submit(request(3, session="b"))
    fleet.router.submit(request(4))
    assert fleet.at_replicas() == [["r0", "r1"], ["r3"], ["r4"]]  # r2 waits for a place on its replica
    fleet.clock.run()
    assert fleet.orders[0] == ["r0", "r1", "r2"]
    fleet.router.submit(request(5, session="b"))
    fleet.clock.run()
    assert "r5" in fleet.orders[1]


def test_the_queue_goes_by_priority_then_arrival() -> None:
    fleet = Fleet(1, capacity=1)
    futures = [fleet.router.submit(request(i, priority=p)) for i, p in enumerate((0, 0, 5, -1, 0))]
    fleet.clock.run()
    assert fleet.orders == [["r0", "r3", "r1", "r4", "r2"]]
    assert all(right(future, i) for i, future in enumerate(futures))


def test_nothing_is_sent_while_held() -> None:
    fleet = Fleet(2)
    running = fleet.router.submit(request(0))
    fleet.router.hold()
    futures = [fleet.router.submit(request(i)) for i in range(1, 5)]
    fleet.clock.run()
    assert running.done() and fleet.orders == [["r0"], []]
    assert not any(future.done() for future in futures)
    fleet.router.release("replica 1")
    fleet.clock.run()
    assert fleet.orders == [["r0"], ["r1", "r2", "r3", "r4"]]
    with pytest.raises(ValueError, match=r"no replica 'x': there are \['replica 0'"):
        fleet.router.hold("x")


def test_tokens_are_the_same_through_a_pause_and_a_load() -> None:
    fleet = Fleet(2)
    futures = [fleet.router.submit(request(i)) for i in range(6)]
    fleet.clock.run(0.5)
    fleet.router.hold()
    for link in fleet.links:
        link.pause()
    fleet.clock.run()
    before = fleet.router.snapshot()
    assert all(0 < len(sampled) < 100 for sampled in before.values())
    for engine in fleet.engines:
        engine.load(1)
    for link in fleet.links:
        link.open()
    fleet.router.release()
    fleet.clock.run()
    for i, future in enumerate(futures):
        old = len(before[f"r{i}"])
        assert right(future, i)
        assert future.result().sampled.weight_versions.tolist() == [0] * old + [1] * (100 - old)


def test_abort_queued_running_unknown_and_ended() -> None:
    fleet = Fleet(1, capacity=2)
    resume = Sampled.of([4, 5], [-1.0, -1.0], 0)
    futures = [fleet.router.submit(request(i)) for i in range(3)] + [fleet.router.submit(request(3, resume=resume))]
    fleet.clock.run(0.3)
    fleet.router.abort(["r0", "r3", "nobody"])
    assert futures[3].result(0).token_ids == [4, 5] and futures[3].result(0).finish_reason == "abort"
    fleet.clock.run(0.31)
    ended = futures[0].result(0)
    assert ended.finish_reason == "abort" and ended.token_ids == tokens_of(0, len(ended.sampled)).tolist()
    assert 25 < len(ended.sampled) < 35
    assert fleet.at_replicas() == [["r1", "r2"]]  # the place was given on
    fleet.router.abort(["r0"])
    fleet.router.abort()
    fleet.clock.run()
    assert {f.result(0).finish_reason for f in futures} == {"abort"}
    assert fleet.router.snapshot() == {}


def test_a_refused_request_fails_alone_and_ids_are_used_once_at_a_time() -> None:
    fleet = Fleet(1, capacity=1)
    bad, good = fleet.router.submit(request(0, 10**6)), fleet.router.submit(request(1))
    with pytest.raises(ValueError, match="already in use"):
        fleet.router.submit(request(1))
    fleet.clock.run()
    with pytest.raises(ValueError, match="max_model_len"):
        bad.result(0)
    assert right(good, 1)
    assert right(_run(fleet, request(1)), 1)


def _run(fleet: Fleet, asked: GenerationRequest) -> Future[Completion]:
    future = fleet.router.submit(asked)
    fleet.clock.run()
    return future


def test_a_dead_replica_fails_what_ran_there_alone() -> None:
    fleet = Fleet(2, capacity=2)
    futures = [fleet.router.submit(request(i, session="s" if i < 3 else None)) for i in range(5)]
    fleet.clock.at(0.5, lambda: fleet.links[0].kill("power cut"))
    fleet.clock.run()
    for future in futures[:2]:
        with pytest.raises(RolloutError, match=r"replica 0 died with request r. under way: power cut"):
            future.result(0)
    assert all(right(futures[i], i) for i in (2, 3, 4))  # also what only waited for it
    with pytest.raises(RolloutError, match="no replica is left"):
        fleet.links[1].kill("fire")
        fleet.clock.run()
        fleet.router.submit(request(9))


def test_requeue_goes_on_from_the_last_tokens_seen() -> None:
    fleet = Fleet(2, capacity=2, requeue=True)
    futures = [fleet.router.submit(request(i)) for i in range(4)]
    fleet.clock.run(0.5)
    seen = fleet.router.snapshot()
    fleet.clock.at(0.8, lambda: fleet.links[0].kill("power cut"))
    fleet.clock.at(0.79, lambda: fleet.router.abort(["r0"]))
    fleet.links[0].send = lambda add, abort: None  # type: ignore[method-assign]  # it does not hear of the abort
    fleet.engines[1].load(1)
    fleet.clock.run()
    assert futures[0].result(0).finish_reason == "abort" and len(futures[0].result(0).sampled) == len(seen["r0"])
    assert all(right(futures[i], i) for i in range(1, 4))
    moved = futures[2].result(0).sampled.weight_versions.tolist()
    assert moved == [0] * len(seen["r2"]) + [1] * (100 - len(seen["r2"]))
    fresh = Fleet(1)
    alone = fresh.router.submit(request(0))
    fresh.engines[0].failure = KeyError("broken")
    fresh.clock.run()
    with pytest.raises(RolloutError, match="replica 0 died, and no other is left: KeyError"):
        alone.result(0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_an_engine_cannot_go_on_with_begins_anew(deterministic: bool) -> None:
    """As vLLM with stop texts; what came with tokens to resume from was never to be sampled anew."""
    fleet = Fleet(2, capacity=2, requeue=True, deterministic=deterministic)
    for engine in fleet.engines:
        engine.add = _never_resuming(engine.add)  # type: ignore[method-assign]
    futures = [fleet.router.submit(request(i)) for i in range(4)]
    fleet.clock.run(0.5)
    seen = fleet.router.snapshot()
    fleet.engines[1].load(1)
    fleet.links[0].kill("power cut")
    fleet.clock.at(0.51, lambda: fleet.router.abort(["r1"]))
    fleet.clock.run()
    assert all(right(futures[i], i) for i in (0, 2, 3))
    ran_there = [i for i in (0, 2, 3) if futures[i].result().sampled.weight_versions.tolist() == [1] * 100]
    assert ran_there and all(len(seen[f"r{i}"]) > 0 for i in ran_there)  # these tokens were given up
    resumed = fleet.router.submit(request(9, resume=Sampled.of([4, 5], [-1.0, -1.0], 0)))
    fleet.clock.run()
    with pytest.raises(ResumeError, match="cannot go on"):
        resumed.result(0)
    assert fleet.router.snapshot() == {}


def _never_resuming(add: Callable[[GenerationRequest], None]) -> Callable[[GenerationRequest], None]:
    def checked(request: GenerationRequest) -> None:
        if len(request.resume):
            raise ResumeError("cannot go on")
        add(request)

    return checked


def test_a_moved_request_that_is_aborted_as_it_is_refused_ends_with_its_tokens() -> None:
    fleet = Fleet(2, capacity=2, requeue=True)
    future = fleet.router.submit(request(0))
    fleet.clock.run(0.5)
    seen = fleet.router.snapshot()["r0"]
    fleet.links[1].send = lambda add, abort: None  # type: ignore[method-assign]
    fleet.links[0].kill("power cut")
    fleet.clock.run()
    fleet.router.abort(["r0"])
    fleet.links[1]._on_events(Events(refusals=[("r0", ResumeError("cannot go on"))]))
    assert future.result(0).finish_reason == "abort" and future.result(0).sampled is seen


def test_a_replica_may_come_later() -> None:
    fleet = Fleet(1, capacity=1)
    futures = [fleet.router.submit(request(i)) for i in range(4)]
    late = FakeTimeEngine(decode_s={1: 0.01}, length_of=lambda request: 10**9)
    fleet.clock.at(0.1, lambda: fleet.router.attach(SimulatedLink("late", late, fleet.clock)))
    fleet.clock.run()
    assert all(right(future, i) for i, future in enumerate(futures))
    assert late.num_sampled == 200


def test_close_fails_what_is_pending() -> None:
    fleet = Fleet(1, capacity=1)
    futures = [fleet.router.submit(request(i)) for i in range(2)]
    fleet.clock.run(0.2)
    fleet.router.close()
    for future in futures:
        with pytest.raises(RolloutError, match="router was closed"):
            future.result(0)
    fleet.clock.run()
    assert fleet.at_replicas() == [[]]  # the replica was told
    with pytest.raises(RolloutError, match="router is closed"):
        fleet.router.submit(request(5))
    fleet.router.close()


def _rounds(speeds: Sequence[float], deterministic: bool) -> list[list[str]]:
    fleet = Fleet(3, capacity=5, speeds=speeds, deterministic=deterministic)
    for engine in fleet.engines:
        set_lengths(engine, lambda request: 1 + (request.seed or 0) * 37 % 211)
    for part in range(2):
        fleet.router.hold()
        first = 100 * part
        for i in range(first, first + 40):
            session = f"s{i % 7}" if i % 3 == 0 else None
            fleet.router.submit(request(i, 300, prompt=1 + i * 13 % 50, session=session, priority=i % 2))
        fleet.router.release()
        for i in range(first + 40, first + 60):
            fleet.clock.run(fleet.clock.now + 0.3)
            fleet.router.submit(request(i, 300))
        fleet.clock.run()
    return fleet.orders


def test_deterministic_routing_does_not_see_how_fast_replicas_are() -> None:
    fast, slow = (0.001, 0.05, 0.01), (0.05, 0.001, 0.2)
    orders = [_rounds(speeds, deterministic=True) for speeds in (fast, slow)]
    placed = [[sorted(order) for order in each] for each in orders]
    assert placed[0] == placed[1]
    assert all(len(order) > 25 for order in placed[0])
    held = [[[name for name in order if int(name[1:]) % 100 < 40] for order in each] for each in orders]
    assert held[0] == held[1]
    placed = [[sorted(order) for order in _rounds(speeds, deterministic=False)] for speeds in (fast, slow)]
    assert placed[0] != placed[1]


def test_a_deterministic_round_knows_nothing_of_the_rounds_before() -> None:
    """Neither what sessions chose there nor, without a source, what lengths were seen."""
    fleet = Fleet(2, capacity=None, deterministic=True, source_of=lambda request: None)  # type: ignore[arg-type]
    for engine in fleet.engines:
        set_lengths(engine, lambda request: 1)
    for sessions in ("abc", "bac"):
        fleet.router.hold()
        first = 10 * len(fleet.orders[0])
        for i, session in enumerate(sessions):
            fleet.router.submit(request(first + i, 100 if i else 300, session=session))
        fleet.router.release()
        fleet.clock.run()
    assert fleet.orders == [["r0", "r10"], ["r1", "r2", "r11", "r12"]]


def test_any_number_of_requests_may_run_where_no_limit_is_set() -> None:
    fleet = Fleet(1, capacity=None)  # type: ignore[arg-type]
    for i in range(500):
        fleet.router.submit(request(i))
    assert len(fleet.at_replicas()[0]) == 500
    with pytest.raises(ValueError, match="max_running_requests=0 must be at least 1"):
        Router([], max_running_requests=0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_admission_looks_at_the_replicas_once(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 replicas and 2,048 requests that wait; each goes where one that looks at all of them would send it."""
    looks = 0
    has_place = Router._has_place

    def counted(self: Router, replica: object) -> bool:
        nonlocal looks
        looks += 1
        return has_place(self, replica)  # type: ignore[arg-type]

    monkeypatch.setattr(Router, "_has_place", counted)
    fleet = Fleet(64, capacity=30, deterministic=deterministic)
    fleet.router.hold()
    lengths = [10 + i * 37 % 301 for i in range(2048)]
    for i, length in enumerate(lengths):
        fleet.router.submit(request(i, length))
    looks = 0
    fleet.router.release()
    assert looks <= 64 + 2048
    loads, expected = [0] * 64, [list[str]() for _ in range(64)]
    for i, length in enumerate(lengths):
        open_to = [n for n in range(64) if deterministic or len(expected[n]) < 30]
        if open_to:
            chosen = min(open_to, key=loads.__getitem__)
            loads[chosen] += 10 + length
            expected[chosen].append(f"r{i}")
    assert fleet.orders == [names[:30] for names in expected]


def test_a_simulation_is_the_same_every_time() -> None:
    assert _rounds((0.01, 0.02, 0.03), False) == _rounds((0.01, 0.02, 0.03), False)


def test_the_example_of_the_documentation(repo_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (repo_root / "docs" / "rollout.md").read_text(), re.S)
    (example,) = (block for block in blocks if "VirtualClock" in block)
    exec(example, {})
    assert re.fullmatch(r"[\d.]+ seconds; tokens: \d{6}\n", capsys.readouterr().out)


# In threads: links around whole engines and their step loops.


@pytest.fixture
def threaded() -> Iterator[Callable[..., tuple[Router, list[FakeTimeRollout]]]]:
    made: list[tuple[Router, list[FakeTimeRollout]]] = []
    before = set(threading.enumerate())

    def make(count: int, *, capacity: int = 64, length: int = 10**9, **options: object) -> object:
        rollouts = [FakeTimeRollout(FakeTimeEngine(length_of=lambda r: length)) for _ in range(count)]
        links = [LocalLink(f"replica {i}", r, interval_s=0.002, progress_s=0.01) for i, r in enumerate(rollouts)]
        made.append((Router(links, max_running_requests=capacity, **options), rollouts))  # type: ignore[arg-type]
        for rollout in rollouts:
            rollout.open()
        return made[-1]

    yield make  # type: ignore[misc]
    for router, rollouts in made:
        router.close()
        for rollout in rollouts:
            rollout.shutdown()
        names = {thread.name for thread in threading.enumerate() if thread not in before}
        assert not names & {"rollout-steps", "link-replica 0"}


Make = Callable[..., tuple[Router, list[FakeTimeRollout]]]


def test_ten_thousand_requests(threaded: Make) -> None:
    router, rollouts = threaded(4, capacity=256)
    begun = time.perf_counter()
    futures: dict[int, Future[Completion]] = {}

    def client(number: int) -> None:
        for i in range(number, 10_000, 4):
            futures[i] = router.submit(request(i, 1 + i % 50, session=f"s{i // 8}"))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not wait_for(futures.values(), LIMIT_S).not_done
    assert time.perf_counter() - begun < 20
    assert len(futures) == 10_000 and all(right(future, i, 1 + i % 50) for i, future in futures.items())
    assert sum(r.fake.num_sampled for r in rollouts) == sum(1 + i % 50 for i in range(10_000))
    assert all(r.fake.most_running <= 256 for r in rollouts)
    assert router.snapshot() == {}


def test_many_threads_submit_and_abort(threaded: Make) -> None:
    router, _ = threaded(2, capacity=8)
    reasons: list[str] = []

    def client(number: int) -> None:
        for i in range(number * 1000, number * 1000 + 50):
            future = router.submit(request(i, 10**5 if i % 5 == 0 else 20))
            if i % 5 == 0:
                router.abort([f"r{i}"])
            done = future.result(LIMIT_S)
            assert done.token_ids == tokens_of(i, len(done.sampled)).tolist()
            reasons.append(done.finish_reason)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert (reasons.count("abort"), reasons.count("length")) == (60, 240)


@pytest.mark.parametrize("requeue", [True, False])
def test_a_broken_engine_is_a_dead_replica(threaded: Make, requeue: bool) -> None:
    router, rollouts = threaded(2, requeue=requeue)
    futures = [router.submit(request(i, 50_000)) for i in range(4)]
    limit = time.monotonic() + LIMIT_S
    while not all(len(entries(router)[f"r{i}"].so_far) for i in range(4)) and time.monotonic() < limit:
        time.sleep(0.005)  # the links report progress by themselves
    rollouts[0].fake.failure = KeyError("broken step")
    for i, future in enumerate(futures):
        if requeue or i % 2:
            assert right(future, i, 50_000) if future.result(LIMIT_S) else False
        else:
            with pytest.raises(RolloutError, match=r"replica 0 died with request r. under way: .*broken step"):
                future.result(LIMIT_S)
    assert right(_done(router.submit(request(9, 5))), 9, 5)


def _done(future: Future[Completion]) -> Future[Completion]:
    future.result(LIMIT_S)
    return future


def test_a_replica_that_died_idle_is_found_by_the_next_request(threaded: Make) -> None:
    router, rollouts = threaded(2, requeue=True)
    rollouts[0]._loop.close()
    assert right(_done(router.submit(request(1, 5))), 1, 5)
    assert not replicas(router)[0].alive


def test_a_refused_request_in_threads(threaded: Make) -> None:
    router, _ = threaded(1)
    with pytest.raises(ValueError, match="does not fit"):
        router.submit(request(1, 10**7)).result(LIMIT_S)
    assert right(_done(router.submit(request(2, 5))), 2, 5)


def test_a_replica_without_weights_is_not_a_dead_one(threaded: Make) -> None:
    """A weight sync empties it for a moment; what comes then is refused, and it serves again afterwards."""
    router, (rollout,) = threaded(1)
    rollout.unload()
    with pytest.raises(RolloutError, match="holds no weights"):
        router.submit(request(1, 5)).result(LIMIT_S)
    rollout.pause()
    rollout.load_weights([], 3)
    rollout.open()
    assert right(_done(router.submit(request(2, 5))), 2, 5)


@pytest.mark.parametrize("tells_progress", [True, False])
def test_an_engine_that_cannot_be_asked_is_a_dead_replica(
    tells_progress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise RolloutError("the engine's process is gone")

    rollout = FakeTimeRollout(FakeTimeEngine(length_of=lambda r: 10**9))
    rollout.open()
    link = LocalLink("replica 0", rollout, interval_s=0.002, progress_s=0.01 if tells_progress else None)
    router = Router([link], max_running_requests=1)
    running, queued = router.submit(request(1, 10**6)), router.submit(request(2, 5))
    monkeypatch.setattr(rollout, "snapshot", gone)
    monkeypatch.setattr(rollout, "abort", gone)
    if tells_progress:
        for future in (running, queued):
            with pytest.raises(RolloutError, match="is gone"):
                future.result(LIMIT_S)
    else:
        router.abort()
        assert [future.result(LIMIT_S).finish_reason for future in (running, queued)] == ["abort", "abort"]
    assert router.snapshot() == {}
    router.close()
    rollout.shutdown()
