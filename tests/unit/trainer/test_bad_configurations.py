"""What can be known to be wrong before anything starts is told before anything starts, with key, value and fix."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.trainer import bad_configurations as bad
from verl_like.config.errors import ConfigError
from verl_like.rewards.manager import RewardManager
from verl_like.trainer import build
from verl_like.trainer.compose import compose
from verl_like.trainer.resume import find_resume

SEED = 2026


class NoProcesses(RewardManager):
    """The manager of graders without their processes, which take most of the time of a check."""

    def __init__(self, *arguments: Any) -> None:
        """Only what was refused in the driver is refused here."""

    def __exit__(self, *_: Any) -> None: ...


def refusal(case: bad.Bad, folder: Path, model: Path) -> str:
    """The text that ends `verl-like plan` for this configuration. Any other error than ConfigError is raised."""
    try:
        config = compose(case.command_line(folder, model))
        with ExitStack() as stack, build.input_errors():
            build.prepare(config, stack)
            find_resume(config)
    except ConfigError as error:
        return str(error)
    return "accepted"


def faults(case: bad.Bad, text: str) -> list[str]:
    """What the text lacks: the key (a section's name may be left out), the value, or more than both."""
    value = yaml.safe_load(case.value)
    shown = {case.value, case.value.strip("'"), str(value), repr(value), case.value.replace("e30", "e+30")}
    shown |= {case.value.rpartition(":")[0]}  # the file of a reference
    shown |= {str(int(value)), f"{value:,}"} if isinstance(value, float | int) and abs(value) < 1e40 else set()
    shown |= (
        {str(name) for name in value} | {str(item) for item in value.values()} if isinstance(value, dict) else set()
    )
    shown |= set(map(str, value)) if isinstance(value, list) else set()
    found = [] if case.key in text or ".".join(case.key.split(".")[-2:]) in text else ["key"]
    found += [] if any(each and each in text for each in shown) else ["value"]
    return found + ([] if len(text) > len(case.key) + len(case.value) + 12 else ["fix"])


def check_drawn(cases: list[bad.Bad], folder: Path, model: Path) -> list[str]:
    wrong = []
    for case in cases:
        text = refusal(case, folder, model)
        if found := ["accepted"] if text == "accepted" else faults(case, text):
            wrong.append(f"{case.key}={case.value}: {found}: {text}")
    return wrong


def test_two_hundred_bad_configurations(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = check_drawn(bad.drawn(200, SEED), tmp_path, tiny_model)
    assert not wrong, "\n".join(wrong)


def test_the_rest_of_them_is_sound(tmp_path: Path, tiny_model: Path) -> None:
    assert refusal(bad.Bad("trainer.seed", "3"), tmp_path, tiny_model) == "accepted"
