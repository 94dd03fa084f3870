"""Checkpoints written while training goes on hold the moment of the save, and failures come to light."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.engine import tiny
from tests.unit.engine.tiny import PolicyLoss, build_engine, denominators, experience, weights
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.state import BackgroundWriter
from verl_like.parallel.dist import ProcessInfo

CONTENTS = ["model", "optimizer", "extra"]


def step(engine: FSDPEngine, seed: int) -> None:
    batch = experience(7, seed=seed)
    engine.train_minibatch(batch, PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)


def test_it_holds_the_moment_of_the_save(
    process: ProcessInfo, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is made to write only after the engine has stepped on."""
    engine = build_engine(process, path)
    step(engine, 0)
    late: list[tuple[BackgroundWriter, list]] = []
    real = BackgroundWriter._write
    monkeypatch.setattr(BackgroundWriter, "_write", lambda self, parts: late.append((self, parts)))
    engine.save(str(tmp_path), contents=CONTENTS, background=True)
    engine.saved(wait=True)
    step(engine, 1)
    (writer, parts), *_ = late
    real(writer, parts)
    other = build_engine(process, path, seed=9)
    other.load(str(tmp_path), contents=CONTENTS)
    step(other, 1)
    expected, actual = weights(engine), weights(other)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_thread_writes_it(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    engine = build_engine(process, path)
    assert engine.saved(wait=False)
    engine.save(str(tmp_path / "a"), contents=CONTENTS, background=True)
    engine.save(str(tmp_path / "b"), contents=CONTENTS, background=True)  # waits for the first
    assert engine.saved(wait=True)
    for folder in ("a", "b"):
        build_engine(process, path, seed=9).load(str(tmp_path / folder), contents=CONTENTS)


def test_what_goes_wrong_in_the_thread_is_raised(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    engine = build_engine(process, path)
    (tmp_path / "model").write_text("a file where the folder should be")
    engine.save(str(tmp_path), contents=["model"], background=True)
    with pytest.raises(RuntimeError, match="model failed"):
        engine.saved(wait=True)
