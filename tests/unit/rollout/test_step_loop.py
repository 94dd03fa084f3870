"""The step loop with an engine made of counters: no model. Replicas of many ranks are threads of this process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest
import torch

from tests.unit.rollout.wire import LIMIT_S, Network, Wire
from verl_like.rollout import step_loop
from verl_like.rollout.orders import Orders
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError, Sampled, SamplingParams
from verl_like.rollout.step_loop import Phase, StepLoop

ENDLESS = 10**9
STEP_S = 0.0005


def _request(name: str, tokens: int = 3, resume: int = 0) -> GenerationRequest:
    begun = Sampled.of([7] * resume, [-1.0] * resume, 0)
    return GenerationRequest(request_id=name, prompt_ids=[1], sampling=SamplingParams(max_tokens=tokens), resume=begun)


class CountingEngine:
    """Every request takes max_tokens steps; request "bad" is refused, request "bomb" breaks the step."""

    def __init__(self) -> None:
        self.weight_version: int | None = 0
        self.left: dict[str, int] = {}
        self.tokens: dict[str, Sampled] = {}
        self.log: list[tuple[str, tuple[str, ...]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.held = threading.Event()  # a step waits for the gate
        self.stepped = threading.Event()

    def add(self, request: GenerationRequest) -> None:
        if request.request_id == "bad":
            raise ValueError("bad request")
        self.log.append(("add", (request.request_id,)))
        self.left[request.request_id] = request.num_left
        self.tokens[request.request_id] = request.resume

    def step(self) -> list[Completion]:
        if not self.gate.is_set():
            self.held.set()
        assert self.gate.wait(LIMIT_S)
        time.sleep(STEP_S)  # as a forward pass does, it lets other threads run
        if "bomb" in self.left:
            raise KeyError("broken step")
        assert self.weight_version is not None
        self.log.append(("step", tuple(self.left)))
        for name in self.left:
            self.tokens[name] += Sampled.of([7], [-1.0], self.weight_version)
        self.left = {name: n - 1 for name, n in self.left.items()}
        self.stepped.set()
        return self._pop([name for name, n in self.left.items() if n <= 0], "length")

    def has_unfinished(self) -> bool:
        return bool(self.left)

    def drop(self, request_ids: Sequence[str]) -> list[Completion]:
        self.log.append(("drop", tuple(request_ids)))
        return self._pop([name for name in request_ids if name in self.left], "abort")

    def progress(self) -> dict[str, Sampled]:
        return dict(self.tokens)

    def _pop(self, names: list[str], reason: str) -> list[Completion]:
        for name in names:
            del self.left[name]
        return [Completion(request_id=n, sampled=self.tokens.pop(n), finish_reason=reason) for n in names]  # type: ignore[arg-type]


class Replica:
    """Loops of `size` ranks with an engine each; `size` None: one without a lockstep."""

    def __init__(self, size: int | None = None) -> None:
        self.network = Network(size or 1)
        self.engines = [CountingEngine() for _ in range(size or 1)]
        self.loops = [
            StepLoop(engine, device=torch.device("cpu"), lockstep=Wire(self.network, rank) if size else None)  # type: ignore[arg-type]
            for rank, engine in enumerate(self.engines)
        ]
        self._threads = ThreadPoolExecutor(len(self.loops))

    @property
    def first(self) -> StepLoop:
        return self.loops[0]

    @property
    def engine(self) -> CountingEngine:
        return self.engines[0]

    def on_all(self, what: Callable[[StepLoop], object]) -> None:
        """Called on every rank at once, as the trainer does."""
        calls = [self._threads.submit(what, loop) for loop in self.loops]
        late = wait(calls, LIMIT_S).not_done
        assert not late, f"{len(late)} ranks did not return"
        for call in calls:
            call.result()

    def open(self) -> None:
        self.on_all(StepLoop.open)

    def pause(self) -> None:
        self.on_all(StepLoop.pause)

    def close(self) -> None:
        for engine in self.engines:
            engine.gate.set()
        self.on_all(StepLoop.close)
        self._threads.shutdown()
        assert not any(loop._thread.is_alive() for loop in self.loops)

    def runs(self) -> None:
        """Return when another step has been made."""
        self.engine.stepped.clear()
        assert self.engine.stepped.wait(LIMIT_S)


@pytest.fixture
def make() -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def build(size: int | None = None, *, opened: bool = True) -> Replica:
        made.append(Replica(size))
        if opened:
            made[-1].open()
        return made[-1]

    yield build
    for replica in made:
        replica.close()


Make = Callable[..., Replica]
sizes = pytest.mark.parametrize("size", [None, 1, 2, 3])


@sizes
def test_futures_resolve_as_each_ends(make: Make, size: int | None) -> None:
    replica = make(size)
    long, short = replica.first.submit(_request("long", 200)), replica.first.submit(_request("short", 1))
    assert len(short.result(LIMIT_S).sampled) == 1
    assert not long.done()
    late = replica.first.submit(_request("late", 2))  # while another runs
    assert late.result(LIMIT_S).finish_reason == "length"
    assert not long.done()
    assert long.result(LIMIT_S).request_id == "long"


@sizes
def test_what_is_submitted_while_paused_waits_for_open(make: Make, size: int | None) -> None:
    replica = make(size, opened=False)
    assert replica.first.phase is Phase.PAUSED
    future = replica.first.submit(_request("a"))
    time.sleep(0.05)
    assert not future.done() and replica.engine.log == []
    replica.open()
    assert len(future.result(LIMIT_S).sampled) == 3
    replica.pause()
    again = replica.first.submit(_request("a"))  # its id is free again
    time.sleep(0.02)
    assert not again.done()
    replica.open()
    again.result(LIMIT_S)


class Slow(list[GenerationRequest]):
    """Steps could be made between two of its requests."""

    def __iter__(self) -> Iterator[GenerationRequest]:
        for request in super().__iter__():
            time.sleep(0.005)
            yield request


def test_a_batch_is_taken_up_with_one_step(make: Make) -> None:
    """While the loop runs, and though each of its requests wakes it."""
    replica = make()
    replica.open()
    running = replica.first.submit(_request("running", ENDLESS))
    for number in range(3):
        names = [f"{number}-{i}" for i in range(5)]
        futures = replica.first.submit_all(Slow(map(_request, names)))
        assert not wait(futures, LIMIT_S).not_done
        steps = [set(who) & set(names) for what, who in replica.engine.log if what == "step"]
        assert {len(who) for who in steps} - {0} == {5}
    twice = replica.first.submit_all([_request("running"), _request("other")])
    with pytest.raises(ValueError, match="'running' is already in use"):
        twice[0].result(LIMIT_S)
    assert len(twice[1].result(LIMIT_S).sampled) == 3
    replica.first.abort(None)
    assert running.result(LIMIT_S).finish_reason == "abort"
    replica.first.close()
    with pytest.raises(RolloutError, match="was shut down"):
        replica.first.submit_all([_request("late")])[0].result(LIMIT_S)


@pytest.mark.parametrize("size", [2, 5, 64])
def test_a_pause_parks_all_ranks_between_the_same_two_steps(make: Make, size: int) -> None:
    replica = make(size)
    futures = [replica.first.submit(_request(f"r{i}", 40 + i)) for i in range(3)]
    for pause in range(3):
        replica.runs()
        replica.pause()
        logs = [list(engine.log) for engine in replica.engines]
        assert all(log == logs[0] for log in logs)
        assert all(loop.phase is Phase.PAUSED for loop in replica.loops)
        assert all(follower.empty() for follower in replica.network.to)
        time.sleep(0.01)
        assert [list(engine.log) for engine in replica.engines] == logs
        futures.append(replica.first.submit(_request(f"p{pause}")))
        replica.open()
    for future in futures:
        assert future.result(LIMIT_S).finish_reason == "length"
    replica.pause()
    assert all(engine.log == replica.engine.log for engine in replica.engines)


@pytest.mark.parametrize("size", [2, 64])
def test_ranks_that_open_and_pause_at_different_times(make: Make, size: int) -> None:
    replica = make(size, opened=False)
    future = replica.first.submit(_request("a", ENDLESS))

    def late(loop: StepLoop) -> None:
        time.sleep(0.0005 * (replica.loops.index(loop) * 7 % size))
        loop.open()
        loop.pause()  # of the first rank perhaps before others are open

    for _ in range(5):
        replica.on_all(late)
        assert all(engine.log == replica.engine.log for engine in replica.engines)
    assert not future.done()


@sizes
def test_abort_while_waiting_and_running(make: Make, size: int | None) -> None:
    replica = make(size)
    running = replica.first.submit(_request("running", ENDLESS, resume=2))
    other = replica.first.submit(_request("other", ENDLESS))
    replica.runs()
    replica.first.abort(["running", "unknown"])
    ended = running.result(LIMIT_S)
    assert ended.finish_reason == "abort" and len(ended.sampled) > 2
    replica.runs()
    assert not other.done()
    replica.pause()
    waiting = replica.first.submit(_request("waiting", resume=1))
    replica.first.abort(["waiting", "running"])  # one has not begun, the other has ended
    assert waiting.done() and waiting.result().finish_reason == "abort" and len(waiting.result().sampled) == 1
    replica.open()
    replica.first.abort(None)
    assert other.result(LIMIT_S).finish_reason == "abort"
    replica.first.abort(None)
    assert replica.first.submit(_request("running")).result(LIMIT_S).finish_reason == "length"


@sizes
def test_abort_of_a_paused_loop_takes_effect_as_it_opens_or_pauses(make: Make, size: int | None) -> None:
    replica = make(size)
    first, second = (replica.first.submit(_request(name, ENDLESS)) for name in ("first", "second"))
    replica.runs()
    replica.pause()
    steps = len(replica.engine.log)
    replica.first.abort(["first"])
    time.sleep(0.02)
    assert not first.done()
    replica.open()
    assert first.result(LIMIT_S).finish_reason == "abort"
    assert replica.engine.log[steps] == ("drop", ("first",))  # before any step
    replica.engine.gate.clear()
    assert replica.engine.held.wait(LIMIT_S)
    replica.first.abort(["second"])
    assert not second.done()
    threading.Timer(0.02, replica.engine.gate.set).start()
    replica.pause()
    assert second.done() and second.result().finish_reason == "abort"  # a pause returns when all that ended is known


@sizes
def test_weights_change_under_requests_that_are_under_way(make: Make, size: int | None) -> None:
    replica = make(size)
    future = replica.first.submit(_request("a", 60))
    replica.runs()
    replica.pause()
    before = len(replica.first.snapshot()["a"])

    def load(loop: StepLoop) -> None:
        with loop.exclusive():
            replica.engines[replica.loops.index(loop)].weight_version = 1

    replica.on_all(load)
    assert not future.done()
    replica.open()
    versions = future.result(LIMIT_S).sampled.weight_versions.tolist()
    assert versions == [0] * before + [1] * (60 - before)


@sizes
def test_exclusive_is_refused_while_requests_run(make: Make, size: int | None) -> None:
    replica = make(size)
    future = replica.first.submit(_request("a", ENDLESS))
    replica.runs()
    with pytest.raises(RolloutError, match="open, 1 requests are still"), replica.first.exclusive():
        pass
    replica.first.abort(None)
    future.result(LIMIT_S)
    if size is None:  # an open loop without requests makes no step
        with replica.first.exclusive():
            pass
    else:
        with pytest.raises(RolloutError, match="the engine is open"), replica.first.exclusive():
            pass
    replica.pause()
    for loop in replica.loops:
        with loop.exclusive():
            pass


def test_a_loop_that_is_opened_under_exclusive_tells_the_version_loaded_there(make: Make) -> None:
    replica = make(2, opened=False)
    future = replica.first.submit(_request("a"))
    with replica.loops[0].exclusive(), replica.loops[1].exclusive():
        replica.open()
        time.sleep(0.02)
        for engine in replica.engines:
            engine.weight_version = 5
    assert future.result(LIMIT_S).sampled.weight_versions.tolist() == [5, 5, 5]


def test_guests_go_before_the_next_step(make: Make) -> None:
    """The loop lets go of the engine's lock for a moment only: who waits for it must not be overtaken every time."""
    replica = make()
    replica.first.submit(_request("a", ENDLESS))
    replica.runs()
    steps = []
    for _ in range(50):
        before = len(replica.engine.log)
        replica.first.snapshot()
        steps.append(len(replica.engine.log) - before)
    assert max(steps) <= 2


def test_snapshot_has_all_pending_requests(make: Make) -> None:
    replica = make()
    names = []
    for i in range(100):
        names.append(f"r{i}")
        replica.first.submit(_request(names[-1], ENDLESS, resume=i % 3))
        found = replica.first.snapshot()
        assert list(found) and set(found) == set(names)
        assert all(len(found[f"r{j}"]) >= j % 3 for j in range(i))
    replica.pause()
    replica.first.submit(_request("waits", resume=2))
    assert len(replica.first.snapshot()["waits"]) == 2


def test_snapshot_has_requests_that_travel_to_the_other_ranks(make: Make) -> None:
    replica = make(2, opened=False)
    replica.first.submit(_request("a", ENDLESS, resume=1))
    replica.first.open()  # the first rank alone: it takes the request up, and has not added it
    for _ in range(20):
        assert set(replica.first.snapshot()) == {"a"}
        time.sleep(0.001)
    replica.open()


@sizes
def test_a_refused_request_fails_alone(make: Make, size: int | None) -> None:
    replica = make(size)
    good, bad = replica.first.submit(_request("good")), replica.first.submit(_request("bad"))
    with pytest.raises(ValueError, match="bad request"):
        bad.result(LIMIT_S)
    assert good.result(LIMIT_S).finish_reason == "length"
    assert replica.first.snapshot() == {}


def test_callbacks_may_submit_abort_and_look(make: Make) -> None:
    replica = make()
    seen: queue.Queue[object] = queue.Queue()

    def look(future: Future[Completion]) -> None:
        seen.put(replica.first.snapshot())
        replica.first.abort(["nobody"])
        seen.put(replica.first.submit(_request("next")))

    for name in ("bad", "good"):
        replica.first.submit(_request(name)).add_done_callback(look)
        assert seen.get(timeout=LIMIT_S) == {}
        following = seen.get(timeout=LIMIT_S)
        assert isinstance(following, Future) and following.result(LIMIT_S).request_id == "next"


def test_an_id_is_used_once_at_a_time(make: Make) -> None:
    replica = make()
    future = replica.first.submit(_request("a", ENDLESS))
    with pytest.raises(ValueError, match="already in use"):
        replica.first.submit(_request("a"))
    replica.first.abort(["a"])
    future.result(LIMIT_S)
    assert replica.first.submit(_request("a")).result(LIMIT_S).finish_reason == "length"


@sizes
def test_a_broken_step_reaches_every_future_and_later_callers(make: Make, size: int | None) -> None:
    replica = make(size, opened=False)
    futures = [replica.first.submit(_request(name)) for name in ("a", "bomb", "b")]
    replica.open()
    for future in futures:
        with pytest.raises(RolloutError, match="broken step") as caught:
            future.result(LIMIT_S)
        assert isinstance(caught.value.__cause__, KeyError)
    for call in (lambda: replica.first.submit(_request("c")), replica.first.open, replica.first.pause):
        with pytest.raises(RolloutError, match="has stopped"):
            call()
    with pytest.raises(RolloutError, match="has stopped"), replica.first.exclusive():
        pass


@sizes
@pytest.mark.parametrize("opened", [True, False])
def test_close_fails_what_is_pending(size: int | None, opened: bool) -> None:
    replica = Replica(size)
    if opened:
        replica.open()
    futures = [replica.first.submit(_request(name, ENDLESS)) for name in ("a", "b")]
    if opened:
        replica.runs()
    replica.close()
    for future in futures:
        with pytest.raises(RolloutError, match="shut down"):
            future.result(LIMIT_S)
    for call in (lambda: replica.first.submit(_request("c")), replica.first.open):
        with pytest.raises(RolloutError, match="shut down"):
            call()


def test_close_of_a_step_that_hangs_fails_its_requests_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "_JOIN_S", 0.05)
    replica = make()
    replica.engine.gate.clear()
    future = replica.first.submit(_request("a", 1))
    replica.first.close()
    with pytest.raises(RolloutError, match="shut down"):
        future.result(LIMIT_S)
    replica.engine.gate.set()
    replica.first._thread.join(LIMIT_S)
    assert "shut down" in str(replica.first._error)


def test_a_rank_with_another_weight_version_refuses(make: Make) -> None:
    replica = make(2, opened=False)
    replica.engines[1].weight_version = 1
    replica.first.submit(_request("a", ENDLESS))
    for loop in replica.loops:
        loop.open()
    with pytest.raises(RolloutError, match=r"version 1, its replica's first rank of version 0"):
        replica.loops[1].pause()
    assert replica.engines[1].log == []


def test_an_idle_replica_is_sent_empty_orders(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "_KEEPALIVE_S", 0.02)
    replica = make(3)
    time.sleep(0.3)
    assert 3 <= len(replica.network.sent) <= 16
    assert set(replica.network.sent) == {Orders(version=0)}
    replica.pause()
    sent = len(replica.network.sent)
    time.sleep(0.1)
    assert len(replica.network.sent) == sent  # nothing waits in the network while paused
    assert all(engine.log == [] for engine in replica.engines)


def test_the_first_ranks_end_frees_the_others(make: Make) -> None:
    replica = make(3)
    waiting = ThreadPoolExecutor(1).submit(replica.loops[1].pause)
    time.sleep(0.02)
    assert not waiting.done()  # the first rank has not said so
    replica.first.close()
    with pytest.raises(RolloutError, match="shut down"):
        waiting.result(LIMIT_S)
    for loop in replica.loops[1:]:
        loop._thread.join(LIMIT_S)
        assert not loop._thread.is_alive()
        with pytest.raises(RolloutError, match="shut down"):
            loop.open()


def test_only_the_first_rank_is_given_requests(make: Make) -> None:
    replica = make(2)
    with pytest.raises(RolloutError, match="only the first rank"):
        replica.loops[1].submit(_request("a"))
    assert replica.loops[1].snapshot() == {}
    replica.loops[1].abort(None)


def test_a_pause_ends_though_the_loop_is_opened_at_once(make: Make) -> None:
    """One thread opens as another pauses: each returns, and the loop is open in the end."""
    replica = make()
    future = replica.first.submit(_request("a", ENDLESS))
    with ThreadPoolExecutor(2) as threads:
        for _ in range(100):
            pause = threads.submit(replica.first.pause)
            opened = threads.submit(replica.first.open)
            pause.result(LIMIT_S), opened.result(LIMIT_S)
            replica.first.open()
    replica.runs()
    assert not future.done()


def test_many_threads_submit_abort_and_pause(make: Make) -> None:
    replica = make(2)

    def client(number: int) -> list[str]:
        reasons = []
        for i in range(30):
            future = replica.first.submit(_request(f"{number}-{i}", 1 + i % 5))
            if i % 4 == 0:
                replica.first.abort([f"{number}-{i}"])
            reasons.append(future.result(LIMIT_S).finish_reason)
        return reasons

    with ThreadPoolExecutor(8) as threads:
        clients = [threads.submit(client, number) for number in range(8)]
        while not all(each.done() for each in clients):
            replica.pause()
            replica.open()
        reasons = [reason for each in clients for reason in each.result(LIMIT_S)]
    assert len(reasons) == 240 and set(reasons) <= {"abort", "length"} and "length" in reasons
    replica.pause()
    assert replica.engines[0].log == replica.engines[1].log and not replica.engine.left


def test_steps_run_on_the_stream_of_the_thread_that_made_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA stream is chosen thread by thread; on different ones, steps and loading weights would not be ordered."""
    chosen: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {threading.current_thread().name}")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "set_stream", lambda stream: chosen.append((threading.current_thread().name, stream))
    )
    loop = StepLoop(CountingEngine(), device=torch.device("cuda", 0))
    loop.open()
    assert loop.submit(_request("a")).result(LIMIT_S).finish_reason == "length"
    loop.close()
    assert chosen == [("rollout-steps", f"stream of {threading.current_thread().name}")]
