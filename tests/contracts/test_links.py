"""One suite for every Link: to an engine in this process, through a socket, and to another process."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from typing import Any, ClassVar

import pytest

from tests.contracts.link_process import MAX_MODEL_LEN, Elsewhere, Here
from verl_like.kit.bench.fake_time import tokens_of
from verl_like.rollout import wire
from verl_like.rollout.client import Events, LocalLink
from verl_like.rollout.link import SocketLink
from verl_like.rollout.rollout_engine import (
    Completion,
    GenerationRequest,
    RolloutError,
    Sampled,
    SamplingParams,
    UnloadedError,
)
from verl_like.rollout.wire import Wire, address_towards

LIMIT_S = 30.0
ENDLESS = 10**7
pytestmark = pytest.mark.timeout(120)


def request(i: int, tokens: int = 20) -> GenerationRequest:
    return GenerationRequest(request_id=f"r{i}", prompt_ids=[1, 2], sampling=SamplingParams(max_tokens=tokens), seed=i)


class Heard:
    """What a link has told."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.completions: dict[str, Completion] = {}
        self.refusals: dict[str, Exception] = {}
        self.deaths: list[str] = []
        self.num_batches = 0
        self.threads: set[int] = set()
        self.react: Callable[[Events], None] = lambda events: None

    def on_events(self, events: Events) -> None:
        self.react(events)
        with self._changed:
            for completion in events.completions:
                assert completion.request_id not in self.completions, "told twice"
                self.completions[completion.request_id] = completion
            self.refusals |= dict(events.refusals)
            self.deaths += [] if events.death is None else [events.death]
            self.num_batches += 1
            self.threads.add(threading.get_ident())
            self._changed.notify_all()

    def wait(self, reached: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
        with self._changed:
            assert self._changed.wait_for(reached, limit_s), (self.completions, self.refusals, self.deaths)

    def ended(self, count: int) -> None:
        self.wait(lambda: len(self.completions) == count)


class Side:
    """A link, what it has told, and the replica at its end."""

    process: ClassVar[Elsewhere | None] = None  # starting one takes seconds: its tests share it, unless they kill it

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.heard = Heard()
        self.end = Here() if kind != "process" else self._elsewhere()
        self.serving: Future[None] | None = None
        if kind == "local":
            assert isinstance(self.end, Here)
            self.link: LocalLink | SocketLink = LocalLink("replica 7", self.end.replica.rollout)
        else:
            self.link = SocketLink("replica 7", *self.call("way"))
        self.link.start(self.heard.on_events)

    @classmethod
    def _elsewhere(cls) -> Elsewhere:
        if cls.process is None or not cls.process.process.is_alive():
            cls.process = Elsewhere()
        cls.process.call("begin").result(60)
        return cls.process

    def call(self, method: str, *arguments: Any) -> Any:
        return self.end.call(method, *arguments).result(LIMIT_S)

    def open(self) -> None:
        if isinstance(self.link, SocketLink):
            self.serving = self.end.call("serve", self.link.num_orders)
        else:
            self.end.replica.rollout.open()  # type: ignore[union-attr]

    def pause(self) -> None:
        if isinstance(self.link, SocketLink):
            assert self.serving is not None
            self.link.pause().result(LIMIT_S)
            self.serving.result(LIMIT_S)
        else:
            self.end.replica.rollout.pause()  # type: ignore[union-attr]
            time.sleep(0.1)  # nobody says when its thread has told all

    def steps(self, at_least: int) -> None:
        """Until that many steps are made."""
        limit = time.monotonic() + LIMIT_S
        while self.call("facts")[1] < at_least:
            assert time.monotonic() < limit
            time.sleep(0.002)

    def close(self) -> None:
        self.link.close()
        self.end.close()


def sides(*kinds: str) -> Any:
    @pytest.fixture(params=kinds)
    def side(request: pytest.FixtureRequest) -> Iterator[Side]:
        made = Side(request.param)
        yield made
        made.close()
        left = [thread.name for thread in threading.enumerate() if "replica 7" in thread.name or "link-" in thread.name]
        assert not left, f"threads are left: {left}"

    return side


@pytest.fixture(scope="module", autouse=True)
def last() -> Iterator[None]:
    yield
    if Side.process is not None:
        Side.process.end()


side = sides("local", "socket", "process")
wired = sides("socket", "process")


def right(completion: Completion, i: int, tokens: int = 20) -> bool:
    return completion.token_ids == tokens_of(i, tokens).tolist() and completion.finish_reason == "length"


class TestAllLinks:
    def test_what_is_sent_ends(self, side: Side) -> None:
        side.link.send([request(i) for i in range(10)], ())
        side.open()
        side.link.send([request(10, 30)], ())
        side.heard.ended(11)
        side.pause()
        assert all(right(side.heard.completions[f"r{i}"], i) for i in range(10))
        assert right(side.heard.completions["r10"], 10, 30)
        assert len(side.heard.threads) == 1 and threading.get_ident() not in side.heard.threads
        assert not side.heard.refusals and not side.heard.deaths

    def test_five_thousand_requests_in_few_messages(self, side: Side) -> None:
        for first in range(0, 5000, 250):
            side.link.send([request(i, 1 + i % 50) for i in range(first, first + 250)], ())
        side.open()
        begun = time.monotonic()
        side.heard.ended(5000)
        took = time.monotonic() - begun
        side.pause()
        assert all(right(side.heard.completions[f"r{i}"], i, 1 + i % 50) for i in range(5000))
        assert side.heard.num_batches <= took / 0.02 + 3  # at most one in 20 ms
        assert side.call("facts")[2] == 0

    def test_a_refused_request_fails_alone(self, side: Side) -> None:
        side.link.send([request(1, MAX_MODEL_LEN), request(2), request(3, 777)], ())
        side.open()
        side.heard.wait(lambda: len(side.heard.refusals) == 2 and side.heard.completions)
        assert "does not fit" in str(side.heard.refusals["r1"]) and "unlucky" in str(side.heard.refusals["r3"])
        assert all(isinstance(error, ValueError) for error in side.heard.refusals.values())
        assert right(side.heard.completions["r2"], 2) and not side.heard.deaths

    def test_without_weights_requests_are_refused_and_nothing_dies(self, side: Side) -> None:
        side.call("unload")
        side.link.send([request(1)], ())
        side.heard.wait(lambda: side.heard.refusals)
        assert isinstance(side.heard.refusals["r1"], UnloadedError) and not side.heard.deaths

    def test_abort_gives_what_was_sampled(self, side: Side) -> None:
        side.link.send([request(1, ENDLESS), request(2, ENDLESS)], ())
        side.link.send([request(3, ENDLESS)], ["r1", "nobody"])  # waits still: it ends with nothing
        side.heard.wait(lambda: "r1" in side.heard.completions)
        assert len(side.heard.completions["r1"].sampled) == 0
        side.open()
        side.steps(5)
        side.link.send((), ["r2", "r3"])
        side.heard.ended(3)
        for i in (2, 3):
            ended = side.heard.completions[f"r{i}"]
            assert ended.finish_reason == "abort" and len(ended.sampled) >= 5
            assert ended.token_ids == tokens_of(i, len(ended.sampled)).tolist()

    def test_snapshot_tells_what_is_under_way(self, side: Side) -> None:
        assert side.link.snapshot() == {}
        side.link.send([request(1, ENDLESS), request(2, ENDLESS)], ())
        assert {name: len(found) for name, found in side.link.snapshot().items()} == {"r1": 0, "r2": 0}
        side.open()
        side.steps(5)
        found = side.link.snapshot()
        assert set(found) == {"r1", "r2"} and len(found["r1"]) >= 5
        assert found["r2"].token_ids.tolist() == tokens_of(2, len(found["r2"])).tolist()

    def test_a_pause_leaves_requests_where_they_are(self, side: Side) -> None:
        side.link.send([request(1, 30_000)], ())
        side.open()
        side.steps(5)
        side.pause()
        side.link.send([request(2)], ())
        before = side.link.snapshot()  # an answer: what was sent has arrived
        paused, steps, pending = side.call("facts")
        time.sleep(0.05)
        assert paused and pending == 2 and steps < 30_000
        assert side.call("facts")[1] == steps and len(side.link.snapshot()["r1"]) == len(before["r1"])
        side.open()
        side.heard.ended(2)
        assert right(side.heard.completions["r1"], 1, 30_000) and right(side.heard.completions["r2"], 2)
        side.pause()

    def test_a_broken_engine_is_a_death_with_its_cause(self, side: Side) -> None:
        side.link.send([request(i, ENDLESS) for i in range(3)], ())
        side.call("break_step")
        side.open()
        side.heard.wait(lambda: side.heard.deaths)
        assert "broken step" in side.heard.deaths[0] and not side.heard.completions
        if side.serving is not None:
            with pytest.raises(RolloutError, match="broken step"):  # without a pause from the driver
                side.serving.result(LIMIT_S)

    def test_after_close_nothing_is_told(self, side: Side) -> None:
        side.link.send([request(1)], ())
        side.link.close()
        side.link.send([request(2)], ())
        time.sleep(0.1)
        assert not side.heard.completions and not side.heard.deaths


class TestThroughASocket:
    def test_what_was_sent_before_begins_with_the_first_step(self, wired: Side) -> None:
        """Also where `serve` is called before the orders come."""
        wired.serving = wired.end.call("serve", 3)
        for part in range(3):
            time.sleep(0.05)
            assert wired.call("facts")[:2] == (True, 0)
            wired.link.send([request(10 * part + i) for i in range(10)], ())
        wired.heard.ended(30)
        assert wired.call("facts")[1] == 20  # steps: as many as one of them takes
        wired.pause()

    def test_a_pause_that_came_before_serve_ends_it(self, wired: Side) -> None:
        assert isinstance(wired.link, SocketLink)
        wired.link.send([request(1, ENDLESS)], ())
        paused = wired.link.pause()
        time.sleep(0.05)
        assert not paused.done()
        wired.open()
        paused.result(LIMIT_S)
        assert wired.serving is not None and wired.serving.result(LIMIT_S) is None
        wired.open()  # that pause counted once
        time.sleep(0.1)
        assert not wired.serving.done()
        wired.pause()

    def test_what_is_aborted_before_a_pause_is_known_when_it_is_made(self, wired: Side) -> None:
        wired.heard.react = lambda events: time.sleep(0.01)  # the pause is told after what is still being acted on
        for cycle in range(20):
            mine = range(100 * cycle, 100 * cycle + 50)
            wired.link.send([request(i, ENDLESS) for i in mine], ())
            wired.open()
            wired.link.send((), [f"r{i}" for i in mine])
            wired.pause()
            assert len(wired.heard.completions) == 50 * (cycle + 1)
        assert wired.call("facts")[2] == 0

    def test_a_callback_may_ask(self, wired: Side) -> None:
        found: list[dict[str, Sampled]] = []
        wired.heard.react = lambda events: found.append(wired.link.snapshot())
        wired.link.send([request(1), request(2, ENDLESS)], ())
        wired.open()
        wired.heard.ended(1)
        assert set(found[0]) == {"r2"}

    def test_when_the_driver_goes_serve_says_so_and_the_engine_rests(self, wired: Side) -> None:
        wired.link.send([request(1, ENDLESS)], ())
        wired.open()
        wired.steps(1)
        wired.link.close()
        assert wired.serving is not None
        with pytest.raises(RolloutError, match="connection to the driver is gone"):
            wired.serving.result(LIMIT_S)
        assert wired.call("facts")[0]
        with pytest.raises(RolloutError, match="connection to the driver is gone"):
            wired.call("serve", 99)

    def test_a_message_that_nobody_knows_ends_serve(self, wired: Side) -> None:
        assert isinstance(wired.link, SocketLink)
        wired.open()
        wired.link._wire.send(("dance",))
        assert wired.serving is not None
        with pytest.raises(RolloutError, match=r"not an order: .'dance'"):
            wired.serving.result(LIMIT_S)
        wired.heard.wait(lambda: wired.heard.deaths)

    def test_a_connection_that_breaks_is_a_death_with_a_name(self, wired: Side) -> None:
        assert isinstance(wired.link, SocketLink)
        paused = wired.link.pause()
        if isinstance(wired.end, Elsewhere):
            os.kill(wired.end.process.pid or 0, signal.SIGKILL)
        else:
            wired.end.replica.server.close()
        wired.heard.wait(lambda: wired.heard.deaths)
        assert wired.heard.deaths[0].startswith("the connection to replica 7 (127.0.0.1:")
        wired.link.send([request(1)], ["r2"])  # raises nothing
        assert wired.link.snapshot() == {}
        for pause in (paused, wired.link.pause()):
            with pytest.raises(RolloutError, match="connection to replica 7"):
                pause.result(LIMIT_S)
        time.sleep(0.05)
        assert len(wired.heard.deaths) == 1

    def test_a_fault_in_the_drivers_own_callback_gives_the_replica_up(self, wired: Side) -> None:
        def fault(events: Events) -> None:
            raise KeyError("ours")

        wired.heard.react = fault
        wired.link.send([request(1)], ())
        wired.open()
        assert wired.serving is not None
        with pytest.raises(RolloutError, match="connection to the driver is gone"):
            wired.serving.result(LIMIT_S)


def test_an_answer_that_does_not_come_is_not_waited_for() -> None:
    side = Side("socket")
    link = SocketLink("other", *Here().replica.way(), timeout_s=0.2)
    try:
        link.start(lambda events: None)
        link._say = lambda message: None  # type: ignore[method-assign]
        begun = time.monotonic()
        assert link.snapshot() == {} and time.monotonic() - begun < 10
    finally:
        link.close()
        side.close()


def test_strangers_are_turned_away_and_only_one_driver_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_HANDSHAKE_S", 1.0)
    end = Here()
    try:
        address, key = end.replica.way()
        with pytest.raises(AuthenticationError):
            Wire.to(address, b"guess")
        silent, stranger = socket.create_connection(address), socket.create_connection(address)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
        link = SocketLink("replica", address, key)
        heard = Heard()
        link.start(heard.on_events)
        link.send([request(1)], ())
        serving = end.call("serve", 1)
        heard.ended(1)
        with pytest.raises(RolloutError, match=r"second \(127.0.0.1:\d+\) cannot be reached"):
            SocketLink("second", address, key)
        link.pause().result(LIMIT_S)
        serving.result(LIMIT_S)
        link.close()
        stranger.close()
        silent.close()
    finally:
        end.close()


def test_a_server_without_a_driver_closes() -> None:
    end = Here()
    end.close()
    assert not end.replica.server._reader.is_alive()


def test_this_hosts_address_as_another_sees_it() -> None:
    assert address_towards("127.0.0.1", 29500) == "127.0.0.1"
