from __future__ import annotations

import pytest

from verl_like.observe.timing import StepClock, timing_per_token_metrics


class FakeTime:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []

    def phase_started(self, name: str) -> None:
        self.events.append(("start", name))

    def phase_ended(self, name: str, seconds: float) -> None:
        self.events.append(("end", name, f"{seconds:g}"))


def test_nested_and_repeated_phases_add_up() -> None:
    now, observer = FakeTime(), Recorder()
    clock = StepClock(observer, now=now)
    with clock("step"):
        now.seconds += 1
        with clock("gen"):
            now.seconds += 2
        with clock("gen"):
            now.seconds += 3
        now.seconds += 4
    assert clock.metrics() == {"timing_s/gen": 5.0, "timing_s/step": 10.0}
    assert observer.events == [
        ("start", "step"), ("start", "gen"), ("end", "gen", "2"), ("start", "gen"), ("end", "gen", "3"),
        ("end", "step", "10"),
    ]  # fmt: skip


def test_a_phase_inside_itself_is_refused_and_leaves_the_outer_one_intact() -> None:
    now = FakeTime()
    clock = StepClock(now=now)
    with clock("step"):
        now.seconds += 1
        with pytest.raises(ValueError, match="'step' is already running"), clock("step"):
            pass
    assert clock.seconds == {"step": 1.0}


def test_a_phase_that_raises_is_timed_and_closed() -> None:
    now, observer = FakeTime(), Recorder()
    clock = StepClock(observer, now=now)
    with pytest.raises(RuntimeError), clock("gen"):
        now.seconds += 2
        raise RuntimeError("boom")
    assert clock.metrics() == {"timing_s/gen": 2.0}
    assert observer.events[-1] == ("end", "gen", "2")
    with clock("gen"):  # not "already running"
        now.seconds += 1
    assert clock.metrics() == {"timing_s/gen": 3.0}


def test_per_token_times_use_response_tokens_for_gen_and_all_tokens_for_passes() -> None:
    seconds = {"gen": 2.0, "update_actor": 6.0, "save_checkpoint": 9.0}
    metrics = timing_per_token_metrics(seconds, response_tokens=500, total_tokens=2000)
    assert metrics == {"timing_per_token_ms/gen": 4.0, "timing_per_token_ms/update_actor": 3.0}
    assert timing_per_token_metrics(seconds, response_tokens=0, total_tokens=0) == {}
