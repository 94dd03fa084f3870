"""Conversations with tools: what the model is sent, what is trained on, and what ends an episode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_like.algorithms.experience import make_experience
from verl_like.batch import Evaluated, Prompt, PromptRow, Scores
from verl_like.config import ActorConfig, AlgorithmConfig
from verl_like.data.chat import PromptEncoder
from verl_like.data.templates import TEMPLATES
from verl_like.episodes.answering import Member
from verl_like.episodes.episode import Episode
from verl_like.episodes.ledger import conversation_metrics
from verl_like.episodes.rows import assemble_rollouts
from verl_like.plugins.agents.tool_agent import Bounds, ToolAgent
from verl_like.plugins.agents.tool_calls.formats import parser_of
from verl_like.plugins.agents.tools.tool_call import ToolSpec
from verl_like.plugins.agents.tools.toolbox import Toolbox
from verl_like.rewards.grading import to_scores
from verl_like.rewards.parts import Part, combine
from verl_like.rewards.reward_call import RewardOutcome
from verl_like.rollout.rollout_engine import Completion, Sampled, SamplingParams

END = 3  # the id that ends a turn
_SPECIAL = {"<|im_start|>": 1, "<|im_end|>": END}
TOOLS = '''
import os, time
from verl.tools.function_tool import function_tool

@function_tool
def multiply(a: int, b: int) -> str:
    """Multiply.

    Args:
        a: one factor
        b: the other
    """
    if a == 13:
        raise ValueError("unlucky")
    if a == 99:
        os._exit(1)
    return str(a * b)
'''
ENVIRONMENT = '''
class Guess:
    def reset(self, target: int, **row):
        if target == 0:
            raise RuntimeError("no target")
        self.target, self.hit = target, False
        return "Guess a number."
    def guess(self, number: int) -> str:
        """Say a guess.

        Args:
            number: the guess
        """
        self.hit = number == self.target
        return "right" if self.hit else "wrong"
    def get_reward(self) -> float:
        return None if self.target == -1 else float(self.hit)
'''
MAZE = '''
class Walk:
    def reset(self, **row):
        self.place = 0
    def step(self, by: int):
        """Go.

        Args:
            by: how far
        """
        self.place += by
        return f"step {by}", 0.5 * by, {"place": self.place}
    def both(self):
        """Two things."""
        return ("left", "right")
    def get_state(self):
        return {"place": self.place}
'''


class LetterTokenizer:
    """One token for each character, and one for each mark of ChatML."""

    chat_template = TEMPLATES["chatml"]

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content'] or ''}<|im_end|>\n" for m in messages)
        return text + "<|im_start|>assistant\n" * options["add_generation_prompt"]

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def encode(self, text: str, **options: Any) -> list[int]:
        for mark, number in _SPECIAL.items():
            text = text.replace(mark, chr(number))
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, **options: Any) -> str:
        marks = {number: "" if skip_special_tokens else mark for mark, number in _SPECIAL.items()}
        return "".join(marks.get(i, chr(i)) for i in ids)


TOKENIZER = LetterTokenizer()


class Model:
    """Says these things, one a turn, each with the end of its turn unless it ends in an ellipsis."""

    def __init__(self, *says: str) -> None:
        self.says, self.asked, self.rooms = list(says), list[list[int]](), list[int]()

    async def __call__(
        self,
        context_ids: list[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        media: Any = None,
    ) -> Completion:
        assert max_tokens is not None
        self.asked.append(list(context_ids))
        self.rooms.append(max_tokens)
        text = self.says.pop(0)
        ids = TOKENIZER.encode(text.removesuffix("...")) + [END] * (not text.endswith("..."))
        cut = len(ids) > max_tokens or text.endswith("...")
        ids = ids[:max_tokens]
        sampled = Sampled.of(ids, [-0.5 - len(self.asked)] * len(ids), 7)
        return Completion(request_id="x", sampled=sampled, finish_reason="length" if cut else "stop")


def call(a: object, b: object = 2, name: str = "multiply") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


def prompt(**fields: Any) -> Prompt:
    messages = [{"role": "user", "content": "6*7?"}]
    ids = TOKENIZER.encode(TOKENIZER.apply_chat_template(messages, add_generation_prompt=True))
    return Prompt(ids=ids, row=PromptRow(index=0, data_source="x", messages=messages, **fields), group=5, position=0)


@contextmanager
def toolbox(folder: Path, **options: Any) -> Iterator[Toolbox]:
    (folder / "tools.py").write_text(TOOLS)
    (folder / "guess.py").write_text(ENVIRONMENT)
    spec = {"function_tool_path": str(folder / "tools.py"), "timeout": 20.0, "max_response_length": 256} | options
    with closing(Toolbox(ToolSpec(**spec), num_workers=1)) as made:
        yield made


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolbox]:
    with toolbox(tmp_path_factory.mktemp("tools")) as made:
        yield made


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolbox]:
    folder = tmp_path_factory.mktemp("guess")
    with toolbox(folder, function_tool_path=None, environment_path=f"{folder / 'guess.py'}:Guess") as made:
        yield made


def converse(
    box: Toolbox, model: Model, asked: Prompt | None = None, *, bounds: dict[str, Any] | None = None, **options: Any
) -> Episode:
    agent = ToolAgent(
        PromptEncoder(TOKENIZER, {}),
        box,
        parser_of("hermes"),
        Bounds(**{"prompt": 200, "response": 1000, **(bounds or {})}),
        **{"end_ids": (END,), "follow_template": False, **options},
    )
    return asyncio.run(agent.run(asked or prompt(), 0, model))


def said(episode: Episode) -> str:
    return TOKENIZER.decode(episode.response_ids(), skip_special_tokens=False)


def test_the_model_goes_on_with_what_the_tool_said(tools: Toolbox) -> None:
    model = Model("Well. " + call(6, 7), "It is 42.")
    episode = converse(tools, model)
    assert said(episode) == (
        f"Well. {call(6, 7)}<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\nIt is 42.<|im_end|>"
    )
    first, second = model.asked
    assert second == [*first, *episode.response_ids()[: -len("It is 42.") - 1]]
    assert episode.failure is None and episode.reward is None and episode.info == {"num_turns": 4}
    assert conversation_metrics([episode])["tools/calls/mean"] == 1.0


def test_only_what_the_model_wrote_is_trained_on(tools: Toolbox) -> None:
    episode, asked = converse(tools, Model(call(6, 7), "42")), prompt()
    rollouts = assemble_rollouts([asked], [[episode]])
    mask_R, ids_R = rollouts.response_mask_BR[0], rollouts.response_ids_BR[0]
    written = TOKENIZER.decode(ids_R[mask_R].tolist(), skip_special_tokens=False)
    assert written == f"{call(6, 7)}<|im_end|>42<|im_end|>"
    assert rollouts.rollout_log_probs_BR[0][mask_R].unique().tolist() == [-2.5, -1.5]
    assert (rollouts.rollout_log_probs_BR[0][~mask_R] == 0).all()
    assert rollouts.prompt_ids_BP[0].tolist() == asked.ids


def test_parallel_calls_are_answered_in_order_and_those_over_the_bound_are_told(tools: Toolbox) -> None:
    text = said(converse(tools, Model(f"{call(2, 3)}{call(4, 5)}{call(6, 7)}", "."), bounds={"calls": 2}))
    answers = [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>tool\n")[1:]]
    assert answers[:2] == ["6", "20"] and "at most 2" in answers[2]


@pytest.mark.parametrize(
    ("says", "told", "count"),
    [
        ('<tool_call>{"name": "multiply", "argu</tool_call>', "could not be read", "malformed_calls"),
        (call(6, 7, "divide"), "Unknown function 'divide'", "failed_calls"),
        ('<tool_call>{"name": "multiply", "arguments": {"a": 1}}</tool_call>', "b", "failed_calls"),
        (call(13), "unlucky", "failed_calls"),
    ],
)
def test_what_the_model_got_wrong_is_answered(tools: Toolbox, says: str, told: str, count: str) -> None:
    episode = converse(tools, Model(says, "I see."))
    assert told in said(episode).split("<|im_start|>tool\n")[1] and said(episode).endswith("I see.<|im_end|>")
    assert episode.counts[count] == 1 and episode.failure is None


def test_a_broken_call_may_end_the_episode(tools: Toolbox) -> None:
    model = Model('<tool_call>{"name"</tool_call>', "never said")
    episode = converse(tools, model, malformed_end=True)
    assert len(episode.turns) == 1 and episode.counts["malformed_calls"] == 1 and model.says == ["never said"]


def test_a_tool_whose_process_dies_ends_the_episode_which_nobody_grades(tools: Toolbox) -> None:
    episode = converse(tools, Model(call(99), "never said"))
    assert episode.failure is not None and episode.failure.kind == "tool_crash"
    outcome = Member(prompt(), episode).known_outcome()
    assert outcome is not None and (outcome.kind, outcome.score) == ("tool_crash", None)
    assert conversation_metrics([episode])["tools/lost_episodes"] == 1.0
    assert said(converse(tools, Model(call(6, 7), "42"))).endswith("42<|im_end|>")  # another process is there


@pytest.mark.parametrize(
    ("bounds", "turns", "count"),
    [
        ({"turns": 2}, 2, "out_of_turns"),
        ({"observations": 1}, 2, "out_of_turns"),
        ({"response": len(call(6, 7)) + 10}, 1, "out_of_tokens"),
        ({}, 3, ""),
    ],
)
def test_bounds(tools: Toolbox, bounds: dict[str, int], turns: int, count: str) -> None:
    episode = converse(tools, Model(call(6, 7), call(6, 7), "42"), bounds=bounds)
    assert len(episode.turns) == turns
    assert sorted(name for name in ("out_of_turns", "out_of_tokens") if episode.counts.get(name)) == (
        [count] * bool(count)
    )


def test_no_answer_is_longer_than_what_is_left(tools: Toolbox) -> None:
    model = Model(call(6, 7), "4" * 500)
    episode = converse(tools, model, bounds={"response": 150})
    assert model.rooms[0] == 150 and len(episode.response_ids()) == 150
    assert episode.turns[-1].finish_reason == "length"


def test_a_call_that_was_cut_off_is_not_made(tools: Toolbox) -> None:
    episode = converse(tools, Model(call(6, 7) + " and..."))
    assert len(episode.turns) == 1 and not episode.counts.get("calls")


def test_rows_that_name_the_single_turn_agent_have_one_turn(tools: Toolbox) -> None:
    seen: list[int | None] = []

    async def ask(
        context_ids: list[int], sampling: object = None, *, max_tokens: int | None = None, media: Any = None
    ) -> Completion:
        seen.append(max_tokens)
        return Completion(request_id="x", sampled=Sampled.of([65], [-1.0], 0), finish_reason="stop")

    agent = ToolAgent(
        PromptEncoder(TOKENIZER, {}),
        tools,
        parser_of("hermes"),
        Bounds(prompt=1, response=1),
        end_ids=(END,),
        follow_template=False,
    )
    asyncio.run(agent.run(prompt(agent="single_turn_agent"), 0, ask))
    assert seen == [None]


def guess(number: int) -> str:
    return f'<tool_call>{{"name": "guess", "arguments": {{"number": {number}}}}}</tool_call>'


@pytest.mark.parametrize(("guesses", "reward"), [([3, 8], 1.0), ([3], 0.0)])
def test_an_environment_begins_the_conversation_and_scores_it(
    guessing: Toolbox, guesses: list[int], reward: float
) -> None:
    model = Model(*map(guess, guesses), "Done.")
    asked = prompt(extra_info={"target": 8})
    episode = converse(guessing, model, asked, environment=True)
    assert guessing.gives_reward and episode.reward == reward
    outcome = Member(asked, episode).known_outcome()
    assert outcome is not None and outcome.score == reward
    assert "6*7?\n\nGuess a number.<|im_end|>" in TOKENIZER.decode(model.asked[0], skip_special_tokens=False)
    rollouts = assemble_rollouts([asked], [[episode]])
    assert rollouts.prompt_ids_BP[0].tolist() == model.asked[0]


def test_an_environment_that_does_not_begin_is_no_reward_of_zero(guessing: Toolbox) -> None:
    asked = prompt(extra_info={"target": 0})
    episode = converse(guessing, Model(), asked, environment=True)
    assert episode.failure is not None and "no target" in episode.failure.message and episode.reward is None
    assert assemble_rollouts([asked], [[episode]]).response_length_B.tolist() == [0]


def test_an_episode_that_is_given_up_leaves_nothing_in_the_tools_process(guessing: Toolbox) -> None:
    class NoLongerWantedError(Exception):
        pass

    ended: list[str] = []
    end: Callable[[str], Any] = guessing.end

    async def ask(
        context_ids: list[int], sampling: object = None, *, max_tokens: int | None = None, media: Any = None
    ) -> Completion:
        raise NoLongerWantedError

    guessing.end = lambda session: ended.append(session) or end(session)  # type: ignore[method-assign,func-returns-value]
    try:
        with pytest.raises(NoLongerWantedError):
            converse(guessing, ask, prompt(extra_info={"target": 8}), environment=True)  # type: ignore[arg-type]
    finally:
        del guessing.end
    assert len(ended) == 1


def test_an_answer_that_the_template_has_no_place_for_ends_the_episode_alone(
    tools: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(messages: list[dict[str, Any]], **options: Any) -> str:
        if any(message["role"] == "tool" for message in messages):
            raise RuntimeError("roles must alternate")
        return LetterTokenizer.apply_chat_template(TOKENIZER, messages, **options)

    monkeypatch.setattr(TOKENIZER, "apply_chat_template", refuse)
    broken = converse(tools, Model('<tool_call>{"name": </tool_call>'))
    assert len(broken.turns) == 1 and broken.failure is None
    good = converse(tools, Model(call(6, 7)))
    assert good.failure is not None and good.failure.kind == "template"


def test_a_budget_that_tool_text_used_up_counts_as_truncated(tools: Toolbox) -> None:
    episode = converse(tools, Model(call(6, 7)), bounds={"response": len(call(6, 7)) + 10})
    assert episode.counts["out_of_tokens"] == 1 and episode.turns[-1].finish_reason == "length"


def test_a_greeting_that_does_not_fit_loses_the_episode(guessing: Toolbox) -> None:
    episode = converse(guessing, Model(), prompt(extra_info={"target": 8}), environment=True, bounds={"prompt": 30})
    assert episode.failure is not None and episode.failure.kind == "prompt_too_long"


@pytest.fixture(scope="module")
def walking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolbox]:
    folder = tmp_path_factory.mktemp("walk")
    (folder / "walk.py").write_text(MAZE)
    with toolbox(folder, function_tool_path=None, environment_path=f"{folder / 'walk.py'}:Walk") as made:
        yield made


def walk(by: int) -> str:
    return f'<tool_call>{{"name": "step", "arguments": {{"by": {by}}}}}</tool_call>'


def columns(episodes: list[Episode]) -> tuple[list[list[float]], list[list[int]]]:
    """Of each episode: the rewards on its sampled tokens, by turn, and the states before its turns."""
    rollouts = assemble_rollouts([prompt()], [episodes])
    assert rollouts.step_BR is not None and rollouts.anchor_BR is not None
    rewards_BR = torch.zeros(rollouts.step_BR.shape)
    if rollouts.step_rewards_BR is not None:
        rewards_BR = rollouts.step_rewards_BR
    rewards, states = list[list[float]](), list[list[int]]()
    for row, episode in enumerate(episodes):
        turns = [rollouts.step_BR[row] == k for k in range(len(episode.turns))]
        rewards.append([float(rewards_BR[row][turn].sum()) for turn in turns])
        states.append([int(rollouts.anchor_BR[row][turn].unique()) for turn in turns])
        for turn in turns:  # on the last token
            assert rewards_BR[row][turn][:-1].abs().sum() == 0
    return rewards, states


def test_what_tools_give_for_a_turns_calls_is_the_turns_reward_where_that_is_wanted(walking: Toolbox) -> None:
    says = (walk(2) + walk(1), walk(-1), "There.")
    with_rewards = converse(walking, Model(*says), turn_rewards=True, bounds={"calls": 2})
    without = converse(walking, Model(*says), bounds={"calls": 2})
    rewards, _ = columns([with_rewards, without])
    assert rewards == [[1.5, -0.5, 0.0], [0.0, 0.0, 0.0]]
    assert with_rewards.info["rollout_reward_scores"] == without.info["rollout_reward_scores"] == {"step": 1.0}
    assert with_rewards.reward is None  # graders score it


def test_an_environments_tuple_of_data_is_text(walking: Toolbox) -> None:
    both = '<tool_call>{"name": "both", "arguments": {}}</tool_call>'
    assert "('left', 'right')" in said(converse(walking, Model(both, "I see."), turn_rewards=True))


def test_turns_that_begin_in_the_same_state_have_the_same_number(walking: Toolbox, tools: Toolbox) -> None:
    """By what the environment says of its state; without that, by what the model read last."""
    there = converse(walking, Model(walk(1), walk(2), "."))
    again = converse(walking, Model(walk(3), walk(-2), "."))
    _, ((a0, a1, a3), (b0, b3, b1)) = columns([there, again])
    assert a0 == b0 and a1 == b1 and a3 == b3 and len({a0, a1, a3}) == 3
    _, ((c0, c42), (d0, d42), (e0, e40)) = columns(
        [converse(tools, Model(call(a, b), ".")) for a, b in ((6, 7), (7, 6), (5, 8))]
    )
    assert c0 == d0 == e0 and c42 == d42 != e40


def test_a_batch_of_single_turns_has_turns_too(tools: Toolbox) -> None:
    """gigpo and step_reinforce need them, whatever the model did."""
    plain = asyncio.run(
        ToolAgent(
            PromptEncoder(TOKENIZER, {}),
            tools,
            parser_of("hermes"),
            Bounds(prompt=200, response=50),
            end_ids=(END,),
            follow_template=False,
        ).run(prompt(agent="single_turn_agent"), 0, single)
    )
    _, ((first,), (second,)) = columns([plain, converse(tools, Model("No call."))])
    assert first == second


async def single(
    context_ids: list[int], sampling: object = None, *, max_tokens: int | None = None, media: Any = None
) -> Completion:
    return Completion(request_id="x", sampled=Sampled.of([65, END], [-1.0, -1.0], 0), finish_reason="stop")


def test_gigpo_by_hand(walking: Toolbox) -> None:
    """Three walks: 0 -> 2 -> end, 0 -> 1 -> 2 -> end, 0 -> 2 -> end; graded 1, 0, 0; half a point a step."""
    episodes = [
        converse(walking, Model(*(walk(by) for by in steps), "."), turn_rewards=True)
        for steps in ((2,), (1, 1), (2, 0))
    ]
    rollouts = assemble_rollouts([prompt()], [episodes])
    score_B = torch.tensor([1.0, 0.0, 0.0])
    scores = Scores(score_B=score_B, valid_B=torch.ones(3).bool(), extras=[{}] * 3, failures=[None] * 3)
    algorithm = AlgorithmConfig(adv_estimator="gigpo", step_reward_gamma=0.5, norm_adv_by_std_in_grpo=False)
    known = Evaluated(response_length_B=rollouts.response_length_B)
    made, _ = make_experience(algorithm, ActorConfig(), rollouts, scores, known, 0.0)
    # Sums: 1 + 1, 0.5 + 0.5, 1 + 0; mean 4/3. Returns of turns, from the end: [1 + 0.5 * 1, 1], [0.5 + 0.25, 0.5, 0],
    # [1 + 0, 0 + 0, 0]. States before turns: [0, 2], [0, 1, 2], [0, 2, 2].
    step = {
        (0, 0): 1.5 - 3.25 / 3, (1, 0): 0.75 - 3.25 / 3, (2, 0): 1.0 - 3.25 / 3,
        (0, 1): 1.0 - 0.25, (1, 2): 0 - 0.25, (2, 1): 0 - 0.25, (2, 2): 0 - 0.25,
        (1, 1): 0.0,
    }  # fmt: skip
    assert rollouts.step_BR is not None
    for (row, turn), above_state in step.items():
        episode_above = (2.0, 1.0, 1.0)[row] - 4 / 3
        tokens = made.advantages_BR[row][rollouts.step_BR[row] == turn]
        assert len(tokens) and torch.allclose(tokens, torch.tensor(episode_above + above_state)), (row, turn)
    algorithm = AlgorithmConfig(adv_estimator="step_reinforce", step_reward_gamma=0.5)
    made, _ = make_experience(algorithm, ActorConfig(), rollouts, scores, known, 0.0)
    returns = {(0, 0): 1.5, (0, 1): 1.0, (1, 0): 0.75, (1, 1): 0.5, (1, 2): 0.0, (2, 0): 1.0, (2, 1): 0.0, (2, 2): 0.0}
    for (row, turn), value in returns.items():
        tokens = made.advantages_BR[row][rollouts.step_BR[row] == turn]
        assert torch.allclose(tokens, torch.tensor(value)), (row, turn)


def test_an_environment_that_gives_no_number_is_no_reward_of_zero(guessing: Toolbox) -> None:
    episode = converse(guessing, Model("I give up."), prompt(extra_info={"target": -1}), environment=True)
    assert episode.reward is None and episode.failure is not None and "get_reward gave None" in episode.failure.message


def test_an_environments_reward_stands_alone(tmp_path: Path) -> None:
    """Beside it a class of verl's form has a reward of its own, which graders are told."""
    (tmp_path / "notes.py").write_text(
        """
from verl.tools.base_tool import BaseTool
class Notes(BaseTool):
    async def calc_reward(self, instance_id, **kwargs):
        return 5.0
"""
    )
    schema = {
        "type": "function",
        "function": {
            "name": "note",
            "description": "",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
    entry = {"class_name": f"{tmp_path / 'notes.py'}:Notes", "config": {}, "tool_schema": schema}
    (tmp_path / "tools.json").write_text(json.dumps({"tools": [entry]}))
    options = {"tool_config_path": str(tmp_path / "tools.json"), "environment_path": f"{tmp_path / 'guess.py'}:Guess"}
    with toolbox(tmp_path, function_tool_path=None, **options) as box:
        episode = converse(box, Model(guess(8), "."), prompt(extra_info={"target": 8}), environment=True)
    assert episode.reward == 1.0
    assert episode.info["rollout_reward_scores"] == {"note": 5.0, "Guess": 1.0}


def test_a_lost_episode_has_no_penalty(tools: Toolbox) -> None:
    lost = Member(prompt(), converse(tools, Model(call(99)))).known_outcome()
    failed = RewardOutcome(kind="timeout", message="a grader's")
    assert lost is not None
    scores = to_scores(
        [combine([Part("environment")], [each]) for each in (lost, failed)], ["x"] * 2, failure_penalty=-1
    )
    assert scores.valid_B.tolist() == [False, True] and scores.score_B[1] == -1
