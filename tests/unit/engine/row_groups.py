"""Ranks that share their rows, and what tests of each way of sharing run: steps, checkpoints, double precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.unit.engine import tiny
from tests.unit.engine.tiny import PolicyLoss, ValueLoss, denominators, experience, weights
from verl_like.batch import Experience
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.engine import sharded_model
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import Objective
from verl_like.kit.selfcheck.check import minibatch_gradients
from verl_like.parallel.dist import ProcessInfo

ALL = ["model", "optimizer", "extra"]


class RowGroup:
    """This rank's place among groups of `size`. rule: how a group cuts its rows."""

    rule: MicroBatchRule

    def __init__(self, process: ProcessInfo, size: int) -> None:
        self.process, self.index, self.count = process, process.rank // size, process.world_size // size

    def engine(self, path: str, **more: Any) -> FSDPEngine:
        raise NotImplementedError

    def rows(self, batch: Experience) -> Experience:
        return batch.select(range(self.index, len(batch), self.count))

    def gradients(self, engine: FSDPEngine, batch: Experience, mine: Experience | None = None) -> dict[str, Tensor]:
        loss = PolicyLoss() if engine.kind == "policy" else ValueLoss()
        rows = self.rows(batch) if mine is None else mine
        return minibatch_gradients(engine, rows, loss, denominators(batch), rule=self.rule)

    def step(self, engine: FSDPEngine, seed: int) -> dict[str, float]:
        batch = experience(7, seed=seed)
        metrics = engine.train_minibatch(self.rows(batch), PolicyLoss(), denominators(batch), rule=self.rule)
        engine.advance_schedule()
        return {name: metrics[name].value for name in ("grad_norm", "pg_loss") if name in metrics}

    def checkpoints(self, path: str, saved: str, others: str | None) -> dict[str, Any]:
        """Two steps, a checkpoint, one more step; and the last step from what `others` saved."""
        engine = self.engine(path)
        before = weights(engine)
        told = [self.step(engine, seed) for seed in range(2)]
        engine.save(saved, contents=[*ALL, "hf_model"])
        told.append(self.step(engine, 2))
        found: dict[str, Any] = {"told": told, "uninterrupted": weights(engine)}
        found["change"] = {name: tensor - before[name] for name, tensor in found["uninterrupted"].items()}
        return found if others is None else found | {"resumed": self.resumed(path, others)}

    def resumed(self, path: str, saved: str) -> dict[str, Tensor]:
        """Weights after the third step, from the checkpoint of two."""
        engine = self.engine(path, seed=50)
        engine.load(saved, contents=ALL)
        self.step(engine, 2)
        return weights(engine)

    def in_float64(self, path: str, batch: Experience) -> dict[str, Tensor]:
        """Gradients in a precision that no key offers, and that grouped products of experts have not."""
        with mock.patch.object(sharded_model, "dtype_of", lambda name: torch.float64):
            engine = self.engine(path, model={"experts_implementation": "eager"})
        objective = Objective(PolicyLoss(), denominators(batch), temperature=1.0)
        engine.accumulate(self.rows(batch), objective, self.rule)
        return {name: gradient.clone() for name, gradient in engine.sharding.full_gradients(torch.float64)}


def fixtures(
    scenarios: ModuleType, alone: Callable[[ProcessInfo], RowGroup], four_in: pytest.MarkDecorator = pytest.mark.engines
) -> tuple[Any, Any, Any, Any]:
    """Fixtures `one`, `two`, `four`, which a module calls so, and "two or four": what one rank and several say.

    They run `everything`, `two` and `four` of the module's scenarios over its `paths`, and save below its `folder`.
    four_in marks the tests of "two or four" that ask four.
    """

    @pytest.fixture(scope="module")
    def one(process: ProcessInfo, paths: dict[str, str], folder: Path) -> dict[str, Any]:
        return scenarios.everything(alone(process), paths, str(folder / "one"), None)

    @pytest.fixture(scope="module")
    def two(folder: Path, paths: dict[str, str], one: dict[str, Any]) -> list[dict[str, Any]]:
        return tiny.spawn_ranks(2, scenarios.two, folder / "ranks2", paths, str(folder / "two"), str(folder / "one"))

    @pytest.fixture(scope="module")
    def four(folder: Path, paths: dict[str, str], two: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return tiny.spawn_ranks(4, scenarios.four, folder / "ranks4", paths, str(folder / "four"), str(folder / "two"))

    @pytest.fixture(scope="module", params=["two", pytest.param("four", marks=four_in)])
    def either(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
        """What each rank says."""
        return request.getfixturevalue(request.param)

    return one, two, four, either
