"""data.curriculum behind the one source of batches: each group is a lesson once, dropped ones too, after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.episodes.fleet import N, collector, dataset
from verl_like.batch import Prompt, Scores, whole_episodes
from verl_like.config import AlgorithmConfig, FilterGroupsConfig
from verl_like.config.data import CurriculumConfig
from verl_like.config.ppo import AsyncTrainingConfig
from verl_like.kit.bench.fake_time import FakeTimeEngine
from verl_like.plugins.samplers.difficulty import CurriculumSampler

ROWS, STEPS = 36, 9
EASY, HARD = (lambda p: p % 3 == 0), (lambda p: p % 3 == 1)
RULES = CurriculumConfig(enable=True, min_signal=0.45, revisit_epochs=1.5)  # two equal responses are enough to drop
SOURCES: dict[str, dict[str, Any]] = {
    "plain": {},
    "additional": {"additional": 2},
    "filtered": {"algorithm": AlgorithmConfig(filter_groups=FilterGroupsConfig(enable=True)), "draw": 4},
    "across": {"asynchronous": AsyncTrainingConfig(over_sample_rate=1.0, max_staleness=2)},
}
SOURCES["across, filtered"] = SOURCES["filtered"] | SOURCES["across"]


def verdict(position: int, nth: int) -> float:
    return 1.0 if EASY(position) or (not HARD(position) and nth == 0) else 0.0


class Life:
    """Steps of a run; every lesson of its sampler is noted: (number of the draw, position)."""

    def __init__(self, made: Any, fleet: Any, lessons: list[tuple[int, int]], version: int = 0) -> None:
        self.made, self.fleet, self.version = made, fleet, version
        learn = made.loader.judged

        def judged(prompt: Prompt, scores: Scores) -> None:
            lessons.append((prompt.group, prompt.position))
            learn(prompt, scores)

        made.loader.judged = judged
        fleet.load(version)
        made.weights_changed(version)

    def make(self, count: int) -> list[dict[str, float]]:
        told = []
        for _ in range(count):
            rollouts, pending = self.made.next_batch(self.version + 1)
            pending.wait()
            self.made.feedback(*whole_episodes(rollouts, pending.result()))
            told.append(dict(self.made.metrics()))
            self.version += 1
            self.made.trained()
            self.fleet.load(self.version)
            self.made.weights_changed(self.version)
        return told


@pytest.mark.parametrize("name", SOURCES)
def test_every_group_is_a_lesson_once_also_after_a_resume(tmp_path: Path, name: str) -> None:
    data, lessons = dataset(tmp_path, ROWS), list[tuple[int, int]]()
    options: dict[str, Any] = {"batch": 4, "verdict": verdict, "curriculum": RULES, "total_steps": STEPS}
    engines = [FakeTimeEngine(length_of=lambda request: 3 + int(request.request_id.split("-")[1]) % 5)]
    with collector(data, **options | SOURCES[name], engines=engines) as (made, fleet):
        Life(made, fleet, lessons).make(5)
        state = made.state_dict()
        state = json.loads(json.dumps(state))
        made.save_under_way(tmp_path)
    gone = len(lessons)
    assert gone == state["ledger"]["used"] + state["ledger"]["dropped"]
    with collector(data, **options | SOURCES[name], engines=engines) as (made, fleet):
        made.load_state_dict(state, tmp_path)
        sampler = CurriculumSampler(RULES, ROWS, N, shuffle=False, seed=1, identity=data.identity())
        sampler.load_state_dict(state)
        mean, _, pool = sampler.beliefs()
        assert (pool == 0).sum() == ROWS - len({position for _, position in lessons})
        assert all((mean[position] > 0.5) == EASY(position) for _, position in lessons if position % 3 < 2)
        told = Life(made, fleet, lessons, version=5).make(STEPS - 5)
        ledger = made.state_dict()["ledger"]
    assert len({number for number, _ in lessons}) == len(lessons) == ledger["used"] + ledger["dropped"] > gone
    assert ledger["used"] == 4 * STEPS
    if "filtered" not in name:  # else all that is trained is mixed anyway
        mixed = sum(position % 3 == 2 for _, position in lessons[gone:]) / len(lessons[gone:])
        assert mixed > 0.5  # a third of all
        assert told[-1]["curriculum/drawn/fresh"] < 1
