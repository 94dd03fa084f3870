"""Taking a run up again: what is refused, and what is said when nothing is left to do."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_like.algorithms.kl import KLController
from verl_like.checkpoint.layout import step_dir, write_latest, write_trainer_state
from verl_like.config import PPOConfig
from verl_like.trainer.checkpoints import Checkpoints
from verl_like.trainer.state import TrainState


class Nothing:
    """Group and source that accept what they are given."""

    def load(self, path: str) -> None: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def interrupted_run(folder: Path, step: int, total_steps: int) -> tuple[Checkpoints, Any]:
    config = PPOConfig()
    config.trainer.default_local_dir = str(folder)
    state = TrainState(step=0, weight_version=0, kl=KLController.from_config(config.algorithm.kl_ctrl))
    path = step_dir(folder, step)
    path.mkdir()
    write_trainer_state(path, {"state": {**state.state_dict(), "step": step, "weight_version": step}, "source": {}})
    write_latest(folder, step)
    run = SimpleNamespace(
        config=config, state=state, total_steps=total_steps, policy=Nothing(), critic=None, source=Nothing()
    )
    return Checkpoints(config.trainer, tokenizer=None), run  # pyright: ignore[reportArgumentType]


def test_a_run_that_has_all_its_steps_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints, run = interrupted_run(tmp_path, step=5, total_steps=5)
    with caplog.at_level(logging.WARNING):
        checkpoints.restore(run)
    assert run.state.step == run.state.weight_version == 5
    assert "step 5 of 5: nothing is left to train" in caplog.text


def test_a_run_with_steps_left_goes_on_quietly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints, run = interrupted_run(tmp_path, step=4, total_steps=5)
    with caplog.at_level(logging.WARNING):
        checkpoints.restore(run)
    assert run.state.step == 4 and not caplog.text


def test_a_resume_without_weights_is_refused(tmp_path: Path) -> None:
    checkpoints, run = interrupted_run(tmp_path, step=4, total_steps=5)
    run.config.actor_rollout_ref.actor.checkpoint.load_contents = ["hf_model"]
    with pytest.raises(ValueError, match=r"load_contents=\['hf_model'\] leaves out the weights of .*global_step_4"):
        checkpoints.restore(run)
    assert run.state.step == 0
