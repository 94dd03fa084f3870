from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.unit.engine import tiny
from verl_like.config import OptimConfig
from verl_like.engine.train_engine import WeightChanges
from verl_like.parallel.dist import shutdown_distributed

START = WeightChanges()


@pytest.mark.parametrize(
    ("lr", "norm", "exact", "sure"),
    [
        (1e-6, 1.0, True, 1),
        (1e-6, 1.0, False, 0),  # 16 bits may lose it
        (1e-8, 1.0, True, 0),  # so may float32
        (1e-6, 1e-4, True, 0),  # small beside AdamW's eps
        (1e-6, math.inf, True, 0),
    ],
)
def test_steps_that_must_have_changed_something(lr: float, norm: float, exact: bool, sure: int) -> None:
    after = START.after_step(lr=lr, grad_norm=norm, exact=exact)
    assert (after.steps, after.sure) == (1, sure)
    assert after.must_differ(START) == bool(sure)


def test_after_a_checkpoint_was_read_weights_may_be_any() -> None:
    step = {"lr": 1e-3, "grad_norm": 1.0, "exact": True}
    assert not START.after_load().after_step(**step).must_differ(START)
    assert START.after_load().after_step(**step).must_differ(START.after_load())


def test_an_engine_counts(tmp_path: Path) -> None:
    process = tiny.single_process()
    try:
        path = tiny.trained_folder(tmp_path / "model", process)
        engine = tiny.build_engine(process, path, optim=OptimConfig(lr=1e-3))
        assert engine.changes == START
        batch = tiny.experience(4)
        engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)
        assert engine.changes == WeightChanges(steps=1, sure=1)
        engine.save(str(tmp_path / "saved"), contents=["model"])
        engine.load(str(tmp_path / "saved"), contents=["model"])
        assert engine.changes == WeightChanges(loads=1, steps=1, sure=1)
    finally:
        shutdown_distributed()
