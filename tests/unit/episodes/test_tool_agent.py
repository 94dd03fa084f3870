"""Conversations with tools: what the model is sent, what is trained on, and what ends an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from verl_like.batch import Prompt, PromptRow
from verl_like.data.chat import PromptEncoder
from verl_like.data.templates import TEMPLATES
from verl_like.episodes.answering import Member
from verl_like.episodes.episode import Episode
from verl_like.episodes.rows import assemble_rollouts
from verl_like.episodes.tally import conversation_metrics
from verl_like.episodes.tool_agent import Bounds, ToolAgent
from verl_like.episodes.tool_calls.formats import parser_of
from verl_like.episodes.tools.tool_call import ToolSpec
from verl_like.episodes.tools.toolbox import Toolbox
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
        return float(self.hit)
'''


class LetterTokenizer:
    """One token for each character, and one for each mark of ChatML."""

    chat_template = TEMPLATES["chatml"]

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content'] or ''}<|im_end|>\n" for m in messages)
        return text + "<|im_start|>assistant\n" * options["add_generation_prompt"]

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def encode(self, text: str) -> list[int]:
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
        self, context_ids: list[int], sampling: SamplingParams | None = None, *, max_tokens: int | None = None
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

    async def ask(context_ids: list[int], sampling: object = None, *, max_tokens: int | None = None) -> Completion:
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

    async def ask(context_ids: list[int], sampling: object = None, *, max_tokens: int | None = None) -> Completion:
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


def test_a_lost_episode_has_no_penalty(tools: Toolbox) -> None:
    lost = Member(prompt(), converse(tools, Model(call(99)))).known_outcome()
    failed = RewardOutcome(kind="timeout", message="a grader's")
    assert lost is not None
    scores = to_scores(
        [combine([Part("environment")], [each]) for each in (lost, failed)], ["x"] * 2, failure_penalty=-1
    )
    assert scores.valid_B.tolist() == [False, True] and scores.score_B[1] == -1
