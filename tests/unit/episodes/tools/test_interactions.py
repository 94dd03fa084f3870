"""Simulated users: they answer the model where it calls nothing, until they end the conversation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.factory import CharTokenizer
from tests.unit.episodes.test_tool_agent import Model, call, columns, converse, prompt, said
from tests.unit.episodes.tools.rows import row, toolbox, write
from verl_like.config import DataConfig
from verl_like.data.dataset import PromptDataset
from verl_like.plugins.agents.start import check_interactions
from verl_like.plugins.agents.tools.tool_call import ToolError
from verl_like.plugins.agents.tools.toolbox import Toolbox

pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

USERS = """
    from verl.interactions.base import BaseInteraction

    class Guess(BaseInteraction):
        open = {}

        async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
            if ground_truth == "none":
                raise RuntimeError("nothing to guess")
            self.open[instance_id] = ground_truth
            return instance_id

        async def generate_response(self, instance_id, messages, **kwargs):
            roles = " ".join(message["role"] for message in messages)
            right = messages[-1]["content"] == self.open[instance_id]
            return right, f"Wrong ({roles}, {len(self.open)} open).", 1.0 if right else -0.25, {}

        async def finalize_interaction(self, instance_id, **kwargs):
            del self.open[instance_id]

    class Odd(BaseInteraction):
        async def generate_response(self, instance_id, messages, **kwargs):
            return "hello"
"""
CONFIG = """
    interaction:
      - class_name: {file}:Guess
        config: {{}}
      - name: odd
        class_name: {file}:Odd
"""
TOOLS = '''
    from verl.tools.function_tool import function_tool

    @function_tool
    def multiply(a: int, b: int) -> str:
        """Multiply.

        Args:
            a: one factor
            b: the other
        """
        return str(a * b)
'''


def guessing(ground_truth: str = "42", **others: Any) -> dict[str, Any]:
    return {"extra_info": {"interaction_kwargs": {"name": "guess", "ground_truth": ground_truth, **others}}}


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolbox]:
    folder = tmp_path_factory.mktemp("users")
    config = write(folder, "users.yaml", CONFIG.format(file=write(folder, "users.py", USERS)))
    with toolbox(interaction_config_path=config, function_tool_path=write(folder, "tools.py", TOOLS)) as made:
        yield made


def test_the_user_answers_until_it_is_content(users: Toolbox) -> None:
    """A call goes to the tool, everything else to the user; what it gives reaches graders and, if wanted, the turns."""
    model = Model(call(6, 7), "41", "42", "never said")
    episode = converse(users, model, prompt(**guessing()), turn_rewards=True)
    assert said(episode).count("Wrong (user assistant tool assistant, 1 open).") == 1
    assert said(episode).endswith("<|im_start|>assistant\n42<|im_end|>") and model.says == ["never said"]
    assert episode.info["turn_scores"] == [-0.25, 1.0] and episode.reward is None
    assert episode.info["rollout_reward_scores"] == {"user_turn_rewards": [-0.25, 1.0]}
    rewards, states = columns([episode])
    assert rewards == [[0.0, -0.25, 1.0]] and len(set(states[0])) == 3
    again = converse(users, Model("41", "42"), prompt(**guessing()))
    assert "Wrong (user assistant, 1 open)." in said(again)  # nothing of the first episode is left


def test_a_row_without_a_user_ends_with_the_first_answer(users: Toolbox) -> None:
    empty = {"interaction_kwargs": {"name": None, "ground_truth": None}}  # as a table's column has it
    for extra_info in ({}, empty):
        assert said(converse(users, Model("41", "42"), prompt(extra_info=extra_info))) == "41<|im_end|>"


def test_the_bounds_hold_for_the_user_too(users: Toolbox) -> None:
    episode = converse(users, Model("1", "2", "3"), prompt(**guessing()), bounds={"observations": 1})
    assert len(episode.turns) == 2 and episode.counts["out_of_turns"] == 1 and episode.info["turn_scores"] == [-0.25]


@pytest.mark.parametrize(
    ("row_fields", "message"),
    [
        (guessing("none"), "nothing to guess"),
        (guessing(name="odd"), r"generate_response must return \(ends, text, reward, metrics\), not 'hello'"),
        (guessing(name="nobody"), "interaction_kwargs.name='nobody': there are guess, odd"),
    ],
)
def test_a_user_that_fails_loses_the_episode(users: Toolbox, row_fields: dict[str, Any], message: str) -> None:
    episode = converse(users, Model("41"), prompt(**row_fields))
    assert episode.failure is not None and episode.failure.kind == "tool_exception"
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(episode.failure.message)


def test_a_name_of_nobody_is_found_before_the_run(users: Toolbox) -> None:
    class Rows(PromptDataset):
        def __init__(self, **interaction_kwargs: str) -> None:
            self.only = row(interaction_kwargs=interaction_kwargs)

        def __getitem__(self, index: int) -> Any:
            return [1], self.only

        def extras(self, name: str) -> Any:
            return iter(())

    check_interactions((Rows(name="guess"), None), users)
    with pytest.raises(ValueError, match="name='gues': there are guess, odd"):
        check_interactions((Rows(name="gues"), None), users)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_name_of_nobody_is_found_in_any_row_that_is_used(users: Toolbox, tmp_path: Path, form: str) -> None:
    """A row without interaction_kwargs has no simulated user."""
    kwargs = [{"name": "guess"}, None, {"name": "odd"}, {"name": "gues"}]
    rows = [{"prompt": [{"role": "user", "content": "x"}], "extra_info": {"interaction_kwargs": k}} for k in kwargs]
    for name, some in (("good", rows[:3]), ("bad", rows)):
        path = tmp_path / f"{name}.{form}"
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist(some), path)
        else:
            path.write_text("".join(json.dumps(each) + "\n" for each in some))
    good, bad = (
        PromptDataset(DataConfig(), str(tmp_path / f"{name}.{form}"), CharTokenizer(True), split="train")
        for name in ("good", "bad")
    )
    check_interactions((good, None), users)
    with pytest.raises(ValueError, match=rf"bad\.{form}, row 3: .*name='gues': there are guess, odd"):
        check_interactions((good, bad), users)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("users: []", "the file must hold a list `interaction`"),
        ("interaction:\n- name: x", r"interaction\[0\] has no class_name"),
        ("interaction:\n- class_name: builtins.int", "int has no start_interaction, generate_response"),
        ("interaction:\n- class_name: {file}:Odd\n- class_name: {file}:Odd", "a second interaction is called odd"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, config: str, message: str) -> None:
    file = write(tmp_path, "users.py", USERS)
    path = write(tmp_path, "users.yaml", config.format(file=file))
    with pytest.raises(ToolError, match=message), toolbox(interaction_config_path=path):
        pass


NATIVE = """
    interaction:
      - name: it
        class_name: verl.interactions.{file}.{kind}
        config: {{}}
"""


@pytest.mark.parametrize("version", ["0.5.0", "0.7.0", "0.7.0 on its own base class", "stand-in"])
def test_verls_user_for_gsm8k(tmp_path: Path, unpack: Callable[..., None], version: str) -> None:
    if version != "stand-in":
        unpack(version.partition(" ")[0], "interactions/gsm8k_interaction.py")
    if "own" in version:
        unpack("0.7.0", "interactions/base.py")
    config = write(tmp_path, "users.yaml", NATIVE.format(file="gsm8k_interaction", kind="Gsm8kInteraction"))
    with toolbox(interaction_config_path=config) as box:
        episode = converse(box, Model("#### 71", "#### 72"), prompt(**guessing("72", name="it")))
    assert "Your response is incorrect!" in said(episode) and said(episode).endswith("#### 72<|im_end|>")
    assert episode.info["turn_scores"] == [0.0, 1.0] and episode.failure is None


def test_verls_user_who_asks_for_the_weather(tmp_path: Path, unpack: Callable[..., None]) -> None:
    unpack("0.7.0", "interactions/weather_interaction.py")
    config = write(tmp_path, "users.yaml", NATIVE.format(file="weather_interaction", kind="WeatherInteraction"))
    tools = write(tmp_path, "tools.py", TOOLS)
    with toolbox(interaction_config_path=config, function_tool_path=tools) as box:
        asked = prompt(**guessing(name="it"))
        assert converse(box, Model("Sunny.", "never said"), asked).info["turn_scores"] == [0.0]
        assert converse(box, Model(call(6, 7), "Warm."), asked).info["turn_scores"] == [1.0]
