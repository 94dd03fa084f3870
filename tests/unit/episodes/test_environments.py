"""Environments that answer messages: turns, rewards, limits, prompts of a turn's own, everybody's forms, pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.episodes import test_tool_agent
from tests.unit.episodes.test_tool_agent import Model, prompt, said
from verl_like.batch import Prompt
from verl_like.config.environments import TEMPLATE_NAMES
from verl_like.episodes.answering import Member
from verl_like.episodes.episode import Episode
from verl_like.episodes.ledger import conversation_metrics
from verl_like.episodes.outcomes import Policies
from verl_like.episodes.rows import assemble_rollouts
from verl_like.plugins.agents.tools.tool_call import ToolError, ToolSpec
from verl_like.plugins.agents.tools.toolbox import Toolbox

FORMS = '''
import os, time
from dataclasses import dataclass
from verl_like.plugins.agents.tools.environments import EnvironmentWorker

class Counts:
    """Gymnasium's form: 0.5 for each word "up", won at two."""
    instruction = "Count."
    def __init__(self, goal=2):
        self.goal = goal
    def reset(self, *, seed=None, options=None):
        self.place = 0
        return f"seed {seed} {(options or {}).get('split')}", {}
    def step(self, action):
        if action == "die":
            os._exit(1)
        if action == "hang":
            time.sleep(60)
        if action == "nan":
            return "", float("nan"), False, False, {}
        known = action == "up"
        self.place += known
        info = {"action_is_valid": known, "success": self.place >= self.goal}
        return f"at {self.place}", 0.5 * known, self.place >= self.goal, False, info
    def get_state(self):
        return self.place

class Messages:
    """init and step of messages."""
    def init(self, ground_truth, **row):
        self.target = ground_truth
        return [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Which?"}]
    async def step(self, message):
        assert message["role"] == "assistant"
        right = message["content"] == self.target
        return [{"role": "user", "content": "No."}], float(right), right

@dataclass
class Result:
    reward: float
    episode_done: bool
    next_messages: list
    metrics: dict

class Tinker:
    """Says the whole conversation each time, with parts of text in it."""
    async def initial_observation(self):
        self.said = [{"role": "user", "content": [{"type": "text", "text": "Go."}]}]
        return self.said
    async def step(self, message):
        self.said += [{**message, "role": "player"}, {"role": "user", "content": "Again."}]
        return Result(0.25, len(self.said) > 4, self.said, {})

class Forgetful(Tinker):
    async def step(self, message):
        result = await super().step(message)
        result.next_messages = [{"role": "user", "content": f"So far {message['content']}."}]
        return result

class Skyrl:
    def init(self, prompt):
        return prompt, {}
    def step(self, action):
        again = [{"role": "user", "content": "Not yet."}]
        ok = action == "ok"
        return {"observations": [] if ok else again, "reward": float(ok), "done": ok, "metadata": {}}

class Mute:
    def reset(self, seed=None):
        return "x"
    def step(self, action):
        return None

class Doubled(EnvironmentWorker):
    async def move(self, playing, message):
        return await super().move(playing, {**message, "content": message["content"].lower()})
'''


@contextmanager
def world(folder: Path, name: str | None = "Counts", **options: Any) -> Iterator[Toolbox]:
    (folder / "forms.py").write_text(FORMS)
    path = {} if name is None else {"environment_path": f"{folder / 'forms.py'}:{name}"}
    box = Toolbox(ToolSpec(**{**path, "timeout": 20.0, **options}), num_workers=1)
    try:
        yield box
    finally:
        box.close()


def converse(box: Toolbox, model: Model, asked: Prompt | None = None, **options: Any) -> Episode:
    return test_tool_agent.converse(box, model, asked, environment=True, **options)


def playing(folder: Path, **own: Any) -> Prompt:
    kind = f"{folder / 'forms.py'}:Counts"
    return prompt(extra_info={"environment": {"kind": kind, "seed": 5, "tag": "counts", **own}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def counts(folder: Path) -> Iterator[Toolbox]:
    with world(folder) as box:
        yield box


def test_the_environment_answers_until_the_game_is_over(counts: Toolbox, folder: Path) -> None:
    model = Model("up", "down", "up")
    episode = converse(counts, model, playing(folder, format_penalty=-0.25))
    user = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert said(episode) == f"up{user.format('at 1')}down{user.format('at 1')}up<|im_end|>"
    assert episode.reward == pytest.approx(0.75) and episode.info["success"] is True and episode.failure is None
    assert [turn.reward for turn in episode.turns] == [None] * 3
    metrics = conversation_metrics([episode, episode])
    assert metrics["env/counts/success"] == 1 and metrics["env/counts/episodes"] == 2
    assert metrics["env/counts/steps/mean"] == 3 and metrics["env/counts/valid_moves"] == pytest.approx(2 / 3)
    first, second, third = (turn.state_id for turn in episode.turns)
    assert first != second == third, "states are the environment's"
    outcome = Member(prompt(), episode).known_outcome()
    assert outcome is not None and (outcome.score, outcome.extras) == (pytest.approx(0.75), {"acc": 1.0})


def test_the_prompt_is_what_the_environment_says(counts: Toolbox, folder: Path) -> None:
    model = Model("up", "up")
    own = {"system": "You play.", "template": "{turn_idx}: {observation} ({actions_left} left)", "max_steps": 9}
    converse(counts, model, playing(folder, split="val", **own))
    text = "".join(map(chr, model.asked[0]))
    assert "system\nYou play." in text and "Count.\n\n1: seed 5 val (9 left)" in text
    assert "2: at 1 (8 left)" in "".join(map(chr, model.asked[1]))
    broken = converse(counts, Model("up"), playing(folder, template="{observatoin}"))
    assert broken.failure is not None and "it may name observation" in broken.failure.message


def test_a_template_is_given_all_names_that_the_configuration_lets_through(counts: Toolbox, folder: Path) -> None:
    template = " ".join(f"{name}={{{name}}}" for name in TEMPLATE_NAMES)
    asked = playing(folder, template=template)
    converse(counts, model := Model("up", "up"), asked, bounds={"prompt": 1000, "response": 1000})
    assert all(f"{name}=" in "".join(map(chr, model.asked[0])) for name in TEMPLATE_NAMES)


def test_turn_rewards_add_up_to_the_score(counts: Toolbox, folder: Path) -> None:
    asked = playing(folder, format_penalty=-0.25)
    episode = converse(counts, Model("up", "down", "up"), asked, turn_rewards=True)
    rollouts = assemble_rollouts([asked], [[episode]])
    assert rollouts.step_rewards_T is not None and episode.reward is not None
    token_rewards = rollouts.step_rewards_T.clone()
    token_rewards[-1] += episode.reward  # where a score stands
    assert token_rewards[token_rewards != 0].tolist() == pytest.approx([0.5, -0.25, 0.5])


def test_a_conversation_that_is_told_anew_is_another_row(folder: Path) -> None:
    """As tinker's training renders it: what step returns is everything that the model reads next."""
    with world(folder, "Forgetful") as box:
        episode = converse(box, model := Model("a", "b"))
    assert [len(row) for row in episode.rows()] == [1, 1] and episode.reward == 0.5 and episode.failure is None
    first, second = ("".join(map(chr, ids)) for ids in model.asked)
    assert "Go." in first and "So far a." in second and "Go." not in second


def test_limits_of_turns_and_of_their_tokens(counts: Toolbox, folder: Path) -> None:
    episode = converse(counts, Model("up", "no", "no"), playing(folder, max_steps=2))
    assert len(episode.turns) == 2 and episode.counts["out_of_turns"] == 1 and episode.reward == 0.5
    assert Policies().outcome(episode, score=0.5, extras={"acc": 0.0}) == "truncated"
    model = Model("up and so on", "up", "up")
    episode = converse(counts, model, playing(folder, max_tokens_per_step=4))
    assert model.rooms == [4, 4, 4] and len(episode.turns) == 3, "a turn that was cut off is a move like another"
    assert episode.turns[0].finish_reason == "length" and episode.info["success"] is True
    assert said(episode).startswith("up a<|im_end|>\n<|im_start|>user\nat 0")
    episode = converse(counts, Model("up", "up"), playing(folder), bounds={"turns": 1})
    assert episode.reward == 0.5, "the last move counts"


def test_each_turn_may_be_a_prompt_of_its_own(counts: Toolbox, folder: Path) -> None:
    model = Model("a", "up", "up")
    own = {"history_length": 1, "template": "{env_instruction} [{history}] now {current_observation}, {step_count}"}
    episode = converse(counts, model, playing(folder, **own))
    assert [len(row) for row in episode.rows()] == [1, 1, 1] and episode.reward == 1.0
    text = ["".join(map(chr, ids)) for ids in model.asked]
    assert "[] now seed 5 train, 0" in text[0] and "[(step 1: seed 5 train -> a)] now at 0, 1" in text[1]
    assert "[(step 2: at 0 -> up)] now at 1, 2" in text[2]
    assert assemble_rollouts([playing(folder)], [[episode]]).response_mask_T.all()


@pytest.mark.parametrize(
    ("name", "says", "reward", "shown"),
    [
        ("Messages", ("7", "42"), 1.0, "No."),
        ("Tinker", ("a", "b"), 0.5, "Again."),
        ("Skyrl", ("no", "ok"), 1.0, "Not yet."),
        ("Counts", ("up", "up"), 1.0, "at 1"),
    ],
)
def test_everybodys_forms(folder: Path, name: str, says: tuple[str, str], reward: float, shown: str) -> None:
    with world(folder, name) as box:
        assert box.acts and box.gives_reward and box.schemas == []
        episode = converse(box, model := Model(*says), prompt(ground_truth="42"))
    assert episode.reward == reward and episode.failure is None and len(episode.turns) == 2
    assert f"user\n{shown}" in said(episode)
    if name == "Messages":
        assert "system\nBe short." in "".join(map(chr, model.asked[0]))


@pytest.mark.parametrize(("says", "kind"), [("die", "tool_crash"), ("nan", "tool_exception"), ("hang", "tool_timeout")])
def test_an_environment_that_fails_loses_its_episode_and_is_replaced(folder: Path, says: str, kind: str) -> None:
    with world(folder, timeout=1.5) as box:
        episode = converse(box, Model("up", says))
        assert episode.failure is not None and (episode.failure.kind, episode.failure.outcome) == (
            kind,
            "environment_error",
        )
        assert converse(box, Model("up", "up")).reward == 1.0


def test_what_is_no_result_is_told(folder: Path) -> None:
    with world(folder, "Mute") as box:
        episode = converse(box, Model("a"))
    assert episode.failure is not None and "step must return (observation, reward" in episode.failure.message


def test_kinds_are_tried_before_anything_starts(folder: Path) -> None:
    with (
        pytest.raises(ToolError, match="did you mean sokoban"),
        world(folder, None, environments=(("sokobann", "{}"),)),
    ):
        pass
    with pytest.raises(ToolError, match="derive the class"):
        kinds = (("bandit", "{}"),)
        with world(folder, None, environments=kinds, worker_cls=f"{folder / 'forms.py'}:Mute"):
            pass


def test_a_worker_of_the_users_moves_its_own_way(folder: Path) -> None:
    kinds = ((f"{folder / 'forms.py'}:Counts", '{"goal": 1}'),)
    (folder / "forms.py").write_text(FORMS)
    with world(folder, None, environments=kinds, worker_cls=f"{folder / 'forms.py'}:Doubled") as box:
        episode = converse(box, Model("UP"), playing(folder, config={"goal": 1}))
    assert episode.info["success"] is True


def test_pictures_are_named_by_weights_row_and_score(folder: Path, tmp_path: Path) -> None:
    own = {"kind": "frozen_lake", "config": {"max_steps": 3}, "render": str(tmp_path), "tag": "lake", "instruction": ""}
    with world(folder, None, environments=(("frozen_lake", "{}"),)) as box:
        converse(box, Model("?", "?", "?"), playing(folder, **own))
    (picture,) = tmp_path.rglob("*.gif")
    assert str(picture.relative_to(tmp_path)) == "weights_000007/0-0_lake_0.0.gif"
