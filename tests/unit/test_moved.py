"""Modules are found by the names that they had before, and are then the same modules."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from verl_like import moved


@pytest.mark.parametrize("old", moved._PLACES)
def test_every_row_leads_somewhere_and_its_old_place_is_empty(old: str) -> None:
    place = moved.place_of(old)
    assert place is not None and moved.place_of(place) is None, "rows name the place of today"
    spec = importlib.util.find_spec(place)
    assert spec is not None and importlib.util.find_spec(old) is not None
    folder = old.replace(".", "/")
    assert spec.origin is not None and f"{folder}/" not in spec.origin and f"{folder}.py" not in spec.origin


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("verl_like.ragged", "verl_like.flat_columns"),
        ("verl_like.environments.frozen_lake", "verl_like.plugins.games.frozen_lake"),
        ("verl_like.episodes.tools.calculator", "verl_like.plugins.agents.tools.calculator"),
        ("verl_like.rewards.math_dapo", "verl_like.plugins.math_grading.math_dapo"),
        ("verl_like.data.preprocess", "verl_like.kit.datasets"),
    ],
)
def test_an_old_name_is_the_same_module(old: str, new: str) -> None:
    first, second = importlib.import_module(old), importlib.import_module(new)
    assert first is second
    assert (first.__name__, first.__spec__ and first.__spec__.name) == (new, new)


def test_a_name_within_a_package_that_moved() -> None:
    assert moved.place_of("verl_like.bench.sync") == "verl_like.kit.bench.sync"
    assert moved.place_of("verl_like.benchmarks") is moved.place_of("verl_like.trainer.ppo") is None
    with pytest.raises(ModuleNotFoundError, match=r"verl_like\.kit\.bench\.nothing|verl_like\.bench\.nothing"):
        importlib.import_module("verl_like.bench.nothing")


def test_a_program_is_run_by_its_old_name() -> None:
    command = [sys.executable, "-m", "verl_like.data.preprocess.gsm8k", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--local_save_dir" in done.stdout, done.stderr
