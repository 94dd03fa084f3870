"""Nested stages: each is charged with its own time alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verl_like.kit.bench import meters
from verl_like.kit.bench.meters import StageClock, Staged


class Engine:
    """Advances the clock by hand: loading an item takes 3, making one takes 2, the call itself 1."""

    rows = 7

    def __init__(self, now: list[float]) -> None:
        self.now = now

    def make(self) -> Iterator[int]:
        for i in range(2):
            self.now[0] += 2
            yield i

    def load(self, items: Iterator[int]) -> int:
        self.now[0] += 1
        total = 0
        for item in items:
            self.now[0] += 3
            total += item
        return total

    def fail(self) -> None:
        self.now[0] += 5
        raise RuntimeError("no")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    value = [100.0]
    monkeypatch.setattr(meters.time, "perf_counter", lambda: value[0])
    return value


def test_a_stage_inside_another(now: list[float]) -> None:
    clock = StageClock(lambda: None)
    engine = Staged(Engine(now), clock, {"make": "make", "load": "load", "fail": "fail"})
    with clock.stage("rest"):
        now[0] += 10
        assert engine.load(engine.make()) == 1 and engine.rows == 7
        now[0] += 20
    now[0] += 1000  # nobody's
    assert clock.seconds == {"rest": 30.0, "load": 7.0, "make": 4.0}


def test_a_failing_stage_is_closed(now: list[float]) -> None:
    clock = StageClock(lambda: None)
    engine = Staged(Engine(now), clock, {"fail": "fail"})
    with clock.stage("rest"):
        with pytest.raises(RuntimeError, match="no"):
            engine.fail()
        now[0] += 1
    assert clock.seconds == {"fail": 5.0, "rest": 1.0}
