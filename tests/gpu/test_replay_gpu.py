"""Recorded steps on a CUDA device: how near a step made again comes, there and on a CPU, and with full_determinism."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from support import overrides, write_task

from verl_like.kit.replaying import replay
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_is_made_again(tmp_path: Path, tiny_model: Path, deterministic: bool) -> None:
    out, settings = tmp_path / "out", {"trainer.device": "cuda", "trainer.save_freq": 1, "trainer.record_freq": 1}
    settings |= {"trainer.total_training_steps": 2, "trainer.full_determinism": deterministic}
    train(compose(overrides(write_task(tmp_path), tiny_model, out, **settings)))
    for device, tolerance in (("cuda", 0.0 if deterministic else 1e-2), ("cpu", 5e-2)):
        found = replay(out, 2, [f"trainer.device={device}"], tolerance)
        for each in found:
            if each.where in ("actor/grad_norm", "actor/pg_loss"):
                print(device, each.where, each.first, each.second)
        assert all(each.same for each in found if each.phase in ("weights", "rollouts", "scores"))
        assert all(each.same for each in found if each.where == "actor/grad_norm"), (device, found)
