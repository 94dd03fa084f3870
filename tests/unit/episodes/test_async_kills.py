"""Asynchronous runs that are killed at random moments: what the trajectory that survives has trained."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.unit.episodes.fleet import N, collector, dataset
from tests.unit.episodes.test_async_source import expected, length_of, rules
from verl_like.episodes.episode import SingleTurn
from verl_like.rollout.fake_time import FakeTimeEngine

ROWS, BATCH, KILLS = 48, 4, 9


class Saved:
    """A run's checkpoint: where it stood, and what was trained until then."""

    def __init__(self) -> None:
        self.version = 0
        self.state: dict[str, Any] | None = None
        self.folder: Path | None = None
        self.trained: list[int] = []


def run_until(moment: tuple[int, str], saved: Saved, made: Any, fleet: Any, rng: random.Random, folder: Path) -> Saved:
    """Steps as a driver makes them, ended without a word at this one: before its batch is there, before its update, or
    after it. The newest checkpoint."""
    version, trained, (last, where) = saved.version, list(saved.trained), moment
    fleet.load(version)
    made.weights_changed(version)
    while version * BATCH < ROWS:
        if version == last and where == "sampling":
            return saved
        rollouts, pending = made.next_batch(version + 1)
        pending.result()
        if version == last and where == "update":
            return saved
        for row, ids in enumerate(rollouts.response_ids_T.split(rollouts.response_length_B.tolist())):
            assert ids.tolist() == expected(int(rollouts.group_B[row]), row % N)
        trained += rollouts.group_B[::N].tolist()
        version += 1
        made.trained()
        fleet.load(version)
        made.weights_changed(version)
        if rng.random() < 0.6 or version * BATCH == ROWS:
            saved = Saved()
            saved.version, saved.trained = version, list(trained)
            saved.state = json.loads(json.dumps(made.state_dict()))
            if rng.random() < 0.8:  # otherwise their tokens are lost, and they begin anew
                saved.folder = folder / f"{rng.random()}"
                saved.folder.mkdir()
                made.save_under_way(saved.folder)
        if version == last and where == "saved":
            return saved
    return saved


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("beyond", ["wait", "continue"])
def test_kills_lose_no_prompt_and_train_none_twice(beyond: str, seed: int, tmp_path: Path) -> None:
    """Nine kills of the driver in each run, 270 in all; in every life one of two replicas may die too."""
    data, rng, saved = dataset(tmp_path, ROWS), random.Random(f"{beyond}{seed}"), Saved()
    asynchronous = rules(beyond, bound=rng.choice([1, 2, 4]), rate=rng.choice([0.5, 1.0, 2.0]))
    for life in range(KILLS + 1):
        engines = [FakeTimeEngine(length_of=length_of) for _ in range(2)]
        more = {"asynchronous": asynchronous, "total_steps": ROWS // BATCH, "runner": SingleTurn(), "requeue": True}
        with collector(data, engines=engines, batch=BATCH, **more) as (made, fleet):
            if saved.state is not None:
                made.load_state_dict(saved.state, saved.folder)
            if rng.random() < 0.5:
                engines[0].failure = RuntimeError("power cut")
            last = saved.version + rng.randrange(3) if life < KILLS else ROWS
            saved = run_until((last, rng.choice(["sampling", "update", "saved"])), saved, made, fleet, rng, tmp_path)
    assert sorted(saved.trained) == list(range(ROWS))
    assert saved.state is not None and saved.state["ledger"]["used"] == ROWS
