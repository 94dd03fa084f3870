"""Why replicas have nothing to sample."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from tests.unit.episodes.fleet import Rewards, collector, dataset, teaches
from tests.unit.episodes.test_async_source import Steps, rules
from verl_like.batch import Prompt
from verl_like.config import AlgorithmConfig
from verl_like.episodes.episode import Ask, Episode, SingleTurn
from verl_like.episodes.staleness import IdleClock
from verl_like.kit.bench.fake_time import FakeTimeEngine
from verl_like.rollout.client import Occupancy


def quick() -> FakeTimeEngine:
    return FakeTimeEngine(length_of=lambda request: 4)


def test_shares_are_of_the_time_of_all_replicas() -> None:
    now = [0.0]
    clock = IdleClock(paused_too=True, clock=lambda: now[0])
    for seconds, seen, cause in (
        (1.0, Occupancy(4, 0, 1, 9), "tail"),
        (2.0, Occupancy(4, 0, 4, 0), "grader"),
        (1.0, Occupancy(4, 4, 0, 9), "tail"),
    ):
        now[0] += seconds
        clock.look(seen, cause)
    found = {name.removeprefix("async/idle_"): share for name, share in clock.shares().items()}
    assert found == {"tail": 1 / 16, "tool": 0, "grader": 8 / 16, "trainer": 0, "weights": 4 / 16}
    assert clock.shares() == clock.shares() != dict.fromkeys(clock.shares(), 0.0)  # reading changes nothing
    clock.restart()
    assert set(clock.shares().values()) == {0.0}


def test_the_time_of_training_is_none_of_the_time_of_sampling() -> None:
    now = [0.0]
    clock = IdleClock(paused_too=False, clock=lambda: now[0])
    now[0] = 9.0
    clock.look(Occupancy(2, 2, 0, 5), "tail")
    now[0] = 10.0
    clock.look(Occupancy(2, 0, 1, 5), "tail")
    assert clock.shares()["async/idle_tail"] == 0.5


class Tool(SingleTurn):
    async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        episode = await super().run(prompt, sample, ask)
        await asyncio.sleep(0.4)
        return episode


def test_a_slow_tool_is_the_cause(tmp_path: Path) -> None:
    with collector(dataset(tmp_path, 24), engines=[quick()], asynchronous=rules(), runner=Tool()) as (made, fleet):
        metrics = Steps(made, fleet).make().metrics
    assert metrics["async/idle_tool"] > 0.4 > metrics["async/idle_tail"] + metrics["async/idle_grader"]
    assert 0.9 < metrics["async/trainer_waited"] <= 1.0


def test_a_slow_grader_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graded = Rewards.submit

    def slowly(self: Rewards, calls: list) -> list:
        found = graded(self, calls)
        late = [type(future)() for future in found]

        def end() -> None:
            time.sleep(0.4)
            for future, one in zip(late, found, strict=True):
                future.set_result(one.result())

        threading.Thread(target=end).start()
        return late

    monkeypatch.setattr(Rewards, "submit", slowly)
    filtered = AlgorithmConfig()
    filtered.filter_groups.enable = True  # a group has ended when it is judged
    settings = {"asynchronous": rules(), "algorithm": filtered, "verdict": teaches}
    with collector(dataset(tmp_path, 24), engines=[quick()], **settings) as (made, fleet):
        metrics = Steps(made, fleet).make().metrics
    assert metrics["async/idle_grader"] > 0.4 > metrics["async/idle_tool"]
