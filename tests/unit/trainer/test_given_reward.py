"""A function as the reward: the file that holds it in the run's folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from verl_like.config import PPOConfig
from verl_like.trainer.own_code import with_reward
from verl_like.user_code import load


class Constant:
    """A callable whose repr has several lines, as that of arrays and modules has."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        return self.value

    def __repr__(self) -> str:
        return f"Constant(\n    {self.value},\n)"


def graded(folder: Path, reward: Any) -> float:
    custom = with_reward(PPOConfig(), reward, folder).custom_reward_function
    return load(f"{custom.path}:{custom.name}", "custom_reward_function")("", "", None)


def test_an_object_of_many_lines(tmp_path: Path) -> None:
    assert graded(tmp_path, Constant(0.25)) == 0.25


def test_the_reward_of_an_earlier_run_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for value in (0.25, 0.25, 0.5):
        with_reward(PPOConfig(), Constant(value), tmp_path)
    assert "another reward than it did: that one is reward_function_1.py now" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reward_function.py", "reward_function_1.py"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert load(f"{tmp_path}/reward_function_1.py:compute_score", "key")("", "", None) == 0.25
