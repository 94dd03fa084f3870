"""float16: small gradients survive, overflow costs a step and halves the scale, a resume goes on with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine import tiny
from tests.unit.engine.tiny import PolicyLoss, build_engine, experience, single_process, weights
from verl_like.config.fsdp import FSDPConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import Objective
from verl_like.engine.optim import LossScale
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed

BATCH = experience(9)


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield single_process()
    shutdown_distributed()


@pytest.fixture(scope="module")
def path(process: ProcessInfo, tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.trained_folder(tmp_path_factory.mktemp("model"), process)


def half(process: ProcessInfo, path: str, **changes: Any) -> FSDPEngine:
    return build_engine(process, path, fsdp=FSDPConfig(dtype="float16"), **changes)


def gradients(engine: FSDPEngine, factor: float) -> dict[str, Tensor]:
    loss, rule = PolicyLoss(factor=factor), tiny.ONE_BATCH
    engine.accumulate(BATCH, Objective(loss, tiny.denominators(BATCH), 1.0), rule)
    found = {n: p.grad.full_tensor() for n, p in engine.model.named_parameters() if p.grad is not None}  # pyright: ignore
    return {name: grad.clone() for name, grad in found.items()}


def step(engine: FSDPEngine, factor: float = 1.0) -> dict[str, float]:
    loss = PolicyLoss(factor=factor)
    metrics = engine.train_minibatch(BATCH, loss, tiny.denominators(BATCH), rule=tiny.ONE_BATCH)
    return {name: metric.value for name, metric in metrics.items()}


def test_gradients_are_those_of_float32(process: ProcessInfo, path: str) -> None:
    """Also of a loss whose gradients are below what float16 holds: without the scale most of them would be 0."""
    engine, exact = half(process, path), build_engine(process, path)
    for factor in (1.0, 1e-6):
        found, wanted = gradients(engine, factor), gradients(exact, factor)
        gaps = {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}
        assert max(gaps.values()) < 0.02, gaps
        assert step(half(process, path), factor)["grad_norm"] == pytest.approx(
            step(build_engine(process, path), factor)["grad_norm"], rel=0.01
        )
    unscaled = half(process, path)
    unscaled._loss_scale = LossScale(torch.float32)
    lost = gradients(unscaled, 1e-6)
    assert sum(int((grad == 0).sum()) for grad in lost.values()) > 1000


def test_overflow_costs_the_step_and_halves_the_scale(process: ProcessInfo, path: str) -> None:
    engine = half(process, path)
    before, scales, overflows = weights(engine), [], []
    for _ in range(12):
        metrics = step(engine, factor=64)
        scales.append(metrics["loss_scale"])
        overflows.append(metrics["loss_scale_overflows"])
        assert metrics["skipped_steps"] == 0  # of which ten in a row end a run
        if not overflows[-1]:
            break
        torch.testing.assert_close(weights(engine), before, rtol=0, atol=0)
    assert overflows[0] == 1 and overflows[-1] == 0
    assert scales == [2.0 ** (16 - i) for i in range(len(scales))]
    assert any(not torch.equal(new, old) for new, old in zip(weights(engine).values(), before.values(), strict=True))


def test_what_no_scale_puts_right_counts_as_skipped(process: ProcessInfo, path: str) -> None:
    engine = half(process, path)
    engine._loss_scale.exponent = 1
    told = [step(engine, factor=float("nan")) for _ in range(3)]
    assert [(each["skipped_steps"], each["loss_scale_overflows"]) for each in told] == [(0, 1), (1, 0), (1, 0)]


def test_the_scale_grows_and_is_kept() -> None:
    scale = LossScale(torch.float16)
    scale.stepped(False)
    for _ in range(1999):
        scale.stepped(True)
    assert scale.exponent == 15
    other = LossScale(torch.float16)
    other.restore(scale.counters())
    assert other.stepped(True)["loss_scale"].value == 2.0**15 and other.exponent == 16
    other.exponent = 24
    for _ in range(2000):
        other.stepped(True)
    assert other.exponent == 24
    plain = LossScale(torch.bfloat16)
    plain.restore(scale.counters())
    assert plain.counters() == {} == plain.stepped(False) and plain.exponent == 0


def test_a_checkpoint_keeps_it(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    engine = half(process, path)
    step(engine, factor=1e6)
    engine.save(str(tmp_path), contents=["model", "optimizer", "extra"])
    again = half(process, path)
    again.load(str(tmp_path), contents=["model", "optimizer", "extra"])
    assert step(again)["loss_scale"] == 2.0**15
    exact = build_engine(process, path)
    exact.load(str(tmp_path), contents=["model", "optimizer", "extra"])
    assert "loss_scale" not in step(exact)
