"""A service that is no grader: counters, kept in the memory of a worker by name. Calls harm themselves, at most."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rewards.test_manager import gone, write
from verl_like import live_metrics
from verl_like.services.pool import WorkerPool
from verl_like.services.service import Result, ServiceError, ServiceSpec

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

COUNTERS = """
    import asyncio, os, subprocess, sys, time

    class Counters:
        is_async = False

        def __init__(self, start=0):
            if start < 0: raise KeyError("start is negative")
            self.start, self.counts = start, {}

        def call(self, payload):
            name, what = payload
            if what == "raise": raise KeyError(name)
            if what == "function": return lambda: 0
            if what == "crash": os._exit(3)
            if what == "hang": time.sleep(1000)
            if what == "greedy": return len(bytearray(10 ** 10))
            if what == "modules": return sorted({"torch", "numpy", "ray", "verl_like.rewards"} & set(sys.modules))
            if what == "child":
                return [os.getpid(), subprocess.Popen(["sleep", "1000"], start_new_session=True).pid]
            if isinstance(what, float): time.sleep(what)
            self.counts[name] = self.counts.get(name, self.start) + 1
            return os.getpid(), self.counts[name]

    class Waiting(Counters):
        is_async = True
        at_work = 0

        async def call(self, payload):
            name, what = payload
            if what == "leave": await asyncio.sleep(0.2); os._exit(3)
            if isinstance(what, float):
                self.at_work += 1
                await asyncio.sleep(what)
                self.at_work -= 1
                return os.getpid(), (name, self.at_work)
            return super().call(payload)

    class Together(Counters):
        def call(self, payloads):
            if payloads == [None]: return []
            return [len(payloads)] * len(payloads)
"""

Futures = list[Future[Result]]


class Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


@contextmanager
def pool_of(folder: Path, kind: str = "Counters", *, num_workers: int = 1, **settings: Any) -> Iterator[WorkerPool]:
    path = write(folder, COUNTERS, "counters.py")
    spec = ServiceSpec(factory=f"{path}:{kind}", section="tools.", **{"noun": "tool", "timeout": 20.0, **settings})
    pool: WorkerPool[tuple[str, Any], Result] = WorkerPool(spec, num_workers=num_workers)
    try:
        pool.start()
        yield pool
    finally:
        pool.close()


def results(futures: Futures, seconds: float = 20.0) -> list[Result]:
    return [future.result(seconds) for future in futures]


def kinds(futures: Futures) -> list[str | None]:
    return [outcome.kind for outcome in results(futures)]


class TestOutcomes:
    def test_values_come_back_and_failures_cost_their_own_call(self, tmp_path: Path) -> None:
        whats = ["one", "raise", "function", "crash", "two", "hang", "three", "modules"]
        with pool_of(tmp_path, timeout=1.0) as pool:
            outcomes = results(pool.submit([("a", what) for what in whats]))
        failed = dict.fromkeys(whats) | {"raise": "exception", "function": "exception"}
        assert [outcome.kind for outcome in outcomes] == list((failed | {"crash": "crash", "hang": "timeout"}).values())
        by_what = dict(zip(whats, outcomes, strict=True))
        assert by_what["one"].value[1] == 1 and by_what["modules"].value == []
        assert (
            "KeyError: 'a'" in by_what["raise"].message
            and "cannot be sent to the trainer" in by_what["function"].message
        )
        assert by_what["crash"].message == "the tool worker exited with status 3"
        assert by_what["hang"].message == "no result within tools.timeout=1 s; process killed"
        assert by_what["hang"].seconds > 0.9

    def test_arguments_and_payloads(self, tmp_path: Path) -> None:
        with pool_of(tmp_path, arguments={"start": 10}) as pool:
            good, bad = results(pool.submit([("a", ""), ("a", lambda: 0)]))
        assert good.value[1] == 11
        assert bad.kind == "exception" and "the payload cannot be sent to the tool process" in bad.message

    @pytest.mark.parametrize("kind", ["Counters", "Waiting"])
    def test_a_payload_that_the_worker_cannot_read(self, tmp_path: Path, kind: str) -> None:
        with pool_of(tmp_path, kind, timeout=10.0) as pool:
            unreadable, *others = pool.submit([("a", Unreadable())]) + pool.submit([("a", 0.1)] * 3)
            assert results([unreadable])[0].message == "the tool worker exited with status 1"
            assert kinds(others) == [None] * 3

    def test_memory(self, tmp_path: Path) -> None:
        with pool_of(tmp_path, memory_limit_mb=512) as pool:
            assert kinds(pool.submit([("a", "x"), ("a", "greedy"), ("a", "x")])) == [None, "memory", None]

    def test_calls_together(self, tmp_path: Path) -> None:
        with pool_of(tmp_path, "Together", batch=True, num_workers=2) as pool:
            three, two, wrong = pool.submit([1, 2, 3]), pool.submit([1, 2]), pool.submit([None])
            assert [outcome.value for outcome in results([*three, *two])] == [3, 3, 3, 2, 2]
            assert "0 results for 1 calls" in results(wrong)[0].message
            with pytest.raises(ValueError, match="has no sessions"):
                pool.submit([1], session="a")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (
                "Counters",
                r"tools\.factory=.*counters\.py:Counters, called with \{'start': -1\}, failed:\n(?s:.*)negative",
            ),
            ("Nothing", r"tools\.factory=.*Nothing.* has no such name"),
        ],
    )
    def test_what_cannot_be_made_is_told_at_the_start(self, tmp_path: Path, name: str, message: str) -> None:
        with pytest.raises(ServiceError, match=message), pool_of(tmp_path, name, arguments={"start": -1}):
            pass

    def test_an_asynchronous_service_is_sent_all_it_may_handle(self, tmp_path: Path) -> None:
        with pool_of(tmp_path, "Waiting", concurrency=16) as pool:
            outcomes = results(pool.submit([(str(number), 0.5) for number in range(16)]))
        assert sorted(outcome.value[1][1] for outcome in outcomes) == list(range(16))  # all were at work together


class TestSessions:
    def test_calls_of_one_go_to_one_worker_in_order(self, tmp_path: Path) -> None:
        futures: dict[str, Futures] = {name: [] for name in "abcdef"}
        with pool_of(tmp_path, num_workers=3) as pool:
            for _ in range(5):
                for name in futures:
                    futures[name] += pool.submit([(name, 0.01), (name, "")], session=name)
            values = {name: [outcome.value for outcome in results(mine)] for name, mine in futures.items()}
        assert all([count for _, count in mine] == list(range(1, 11)) for mine in values.values())
        places = Counter(mine[0][0] for mine in values.values())
        assert all(len({pid for pid, _ in mine}) == 1 for mine in values.values())
        assert len(places) == 3

    def test_one_at_a_time_beside_others_in_one_event_loop(self, tmp_path: Path) -> None:
        with pool_of(tmp_path, "Waiting") as pool:
            first = pool.submit([("a", 1.5), ("a", 0.0)], session="a")
            second = pool.submit([("b", 0.3)], session="b")
            assert results(second)[0].value[1] == ("b", 1)  # beside the first
            assert not any(future.done() for future in first)
            assert [outcome.value[1] for outcome in results(first)] == [("a", 0)] * 2

    def test_a_crash_loses_the_sessions_of_its_worker(self, tmp_path: Path) -> None:
        with pool_of(tmp_path, num_workers=2) as pool:
            pids = {name: results(pool.submit([(name, "")], session=name))[0].value[0] for name in "abcd"}
            assert sorted(Counter(pids.values()).values()) == [2, 2]
            beside = next(name for name in "bcd" if pids[name] == pids["a"])
            elsewhere = next(name for name in "bcd" if pids[name] != pids["a"])
            outcomes = results(pool.submit([("a", "crash"), ("a", ""), ("a", "")], session="a"))
            assert [outcome.kind for outcome in outcomes] == ["crash"] * 3
            assert outcomes[0].message == "the tool worker exited with status 3; session 'a' is lost"
            lost = "session 'a' is lost: the tool worker that had it exited with status 3"
            assert [outcome.message for outcome in outcomes[1:]] == [lost] * 2
            for name in ("a", beside):
                (outcome,) = results(pool.submit([(name, "")], session=name))
                assert outcome.kind == "crash" and f"session {name!r} is lost" in outcome.message
                pool.end_session(name)
                assert results(pool.submit([(name, "")], session=name))[0].value[1] == 1
            assert results(pool.submit([(elsewhere, "")], session=elsewhere))[0].value == (pids[elsewhere], 2)

    def test_a_hang_is_told_as_such_and_loses_the_session(self, tmp_path: Path) -> None:
        with pool_of(tmp_path, timeout=1.0) as pool:
            hung, behind = results(pool.submit([("a", "hang"), ("a", "")], session="a"))
        assert (hung.kind, behind.kind) == ("timeout", "crash")
        assert hung.message == "no result within tools.timeout=1 s; process killed; session 'a' is lost"
        assert (
            behind.message == "session 'a' is lost: the tool worker that had it gave no result within tools.timeout=1 s"
        )

    def test_memory_that_runs_out_loses_the_session(self, tmp_path: Path) -> None:
        with pool_of(tmp_path, memory_limit_mb=512) as pool:
            assert kinds(pool.submit([("a", ""), ("a", "greedy"), ("a", "")], session="a")) == [None, "memory", "crash"]
            assert kinds(pool.submit([("b", "")])) == [None]

    def test_a_crash_in_an_event_loop_retries_what_has_no_session(self, tmp_path: Path) -> None:
        with pool_of(tmp_path, "Waiting") as pool:
            waiting = pool.submit([("a", 5.0), ("a", "")], session="a")
            plain = pool.submit([("b", 0.5), ("b", "leave"), ("b", 0.5)])
            assert kinds(plain) == [None, "crash", None]
            assert [outcome.kind for outcome in results(waiting)] == ["crash"] * 2
            assert all("session 'a' is lost: the tool worker that had it exited" in o.message for o in results(waiting))

    def test_a_time_limit_in_an_event_loop_leaves_the_session(self, tmp_path: Path) -> None:
        with pool_of(tmp_path, "Waiting", timeout=0.5) as pool:
            assert kinds(pool.submit([("a", 5.0), ("a", "")], session="a")) == ["timeout", None]

    def test_an_ended_one_is_forgotten(self, tmp_path: Path) -> None:
        with pool_of(tmp_path, num_workers=1) as pool:
            last = pool.submit([("a", 0.3), ("a", "")], session="a")
            pool.end_session("a")
            pool.end_session("a")
            again = pool.submit([("a", "")], session="a")
            assert [outcome.value[1] for outcome in results(last)] == [1, 2]
            assert kinds(again) == [None]
            pool.end_session("a")
            assert pool._waiting._sessions == {}
            assert [len(worker.place.sessions) for worker in pool._workers] == [0]

    def test_unsendable_first_call(self, tmp_path: Path) -> None:
        with pool_of(tmp_path) as pool:
            refused, next_one = results(pool.submit([("a", lambda: 0), ("a", "")], session="a"))
        assert refused.kind == "exception" and next_one.value[1] == 1


class TestGauges:
    def test_what_a_pool_has_in_hand_can_be_read_meanwhile(self, tmp_path: Path) -> None:
        def shown() -> dict[str, float]:
            start = "pool/counter/"
            return {n.removeprefix(start): value for n, value in live_metrics.readings().items() if n.startswith(start)}

        assert not shown()
        with pool_of(tmp_path, noun="counter") as pool:
            calls = pool.submit([("a", 3.0), ("a", "crash"), *[("a", "")] * 60])
            deadline = time.monotonic() + 20
            while shown()["calls_running"] == 0 and time.monotonic() < deadline:
                time.sleep(0.01)
            now = shown()
            assert now["workers"] == 1 and now["calls_waiting"] > 0
            assert now["calls_running"] + now["calls_waiting"] <= 62
            results(calls)
            after = shown()
            assert (after["calls_running"], after["calls_waiting"], after["workers_replaced"]) == (0, 0, 1)
        assert not shown()


class TestEnd:
    def test_nothing_is_left_of_a_pool_closed_under_load(self, tmp_path: Path) -> None:
        with pool_of(tmp_path, num_workers=2) as pool:
            pids = [pid for outcome in results(pool.submit([("a", "child")] * 4)) for pid in outcome.value]
            pids += pool.worker_pids()
            folders = [worker._temporary.path for worker in pool._workers]
            futures = pool.submit([("x", 0.05)] * 200)
            for name in "abcdefgh":
                futures += pool.submit([(name, 0.05)] * 20, session=name)
            pool.end_session("b")  # its calls are in no table any more
            time.sleep(0.3)
            assert all(Path(f"/proc/{pid}").exists() for pid in pids)
            pool.close()
            done, waiting = wait(futures, timeout=0)
            assert not waiting
            failures = [future.exception() for future in done]
            assert {str(error) for error in failures if error is not None} == {"the tool pool was closed"}
            assert any(error is None for error in failures)
            with pytest.raises(RuntimeError, match="the tool pool is closed"):
                pool.submit([("x", "")])
        assert all(gone(pid, 0.5) for pid in pids)
        assert not any(os.path.exists(folder) for folder in folders)

    def test_a_producer_waits_while_too_many_calls_do(self, tmp_path: Path) -> None:
        path = write(tmp_path, COUNTERS, "counters.py")
        pool: WorkerPool[Any, Result] = WorkerPool(
            ServiceSpec(factory=f"{path}:Counters", timeout=20.0), num_workers=1, max_pending=4
        )
        futures: Futures = []

        def produce() -> None:
            for number in range(12):
                futures.extend(pool.submit([("a", 0.1)], session=number % 2))

        try:
            pool.start()
            producer = threading.Thread(target=produce)
            producer.start()
            time.sleep(0.3)
            assert producer.is_alive() and len(futures) < 10  # held up: a few at work or done + 4 waiting
            producer.join(20)
            assert [outcome.value[1] for outcome in results(futures)] == list(range(1, 13))
            assert pool._waiting.num_calls == 0
        finally:
            pool.close()
