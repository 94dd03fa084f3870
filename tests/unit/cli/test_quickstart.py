"""`verl-like quickstart`: the recipe's script in a clone; tests/e2e/test_wheel.py has that of a wheel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from verl_like.cli.main import main
from verl_like.kit.verbs import quickstart

ROOT = Path(__file__).resolve().parents[3]


def test_a_clone_runs_its_own_recipe() -> None:
    assert quickstart.script() == ROOT / "recipes" / "quickstart" / "run.py"


def test_the_script_takes_the_process_over_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that signals and the exit status are the script's."""
    taken: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: taken.append((program, command)))
    main(["quickstart", "trainer.save_freq=5", "--rollout", "hf", "--seed", "3"])
    options = "--output-dir outputs/quickstart --seed 3 --rollout hf trainer.save_freq=5"
    assert taken == [(sys.executable, [sys.executable, str(quickstart.script()), *options.split()])]
