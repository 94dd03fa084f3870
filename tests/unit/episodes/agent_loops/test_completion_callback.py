"""verl 0.5's completion callbacks: what they append is read, what was sampled is trained on."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.unit.episodes.agent_loops.letters import END, Letters
from tests.unit.episodes.agent_loops.loops import Policy, context_of, prompt
from verl_like.config import RolloutConfig
from verl_like.config.schema import to_dict
from verl_like.data.chat import PromptEncoder
from verl_like.episodes.episode import SingleTurn
from verl_like.plugins.verl_agents.messages import AgentLoopError, AgentLoopSpec
from verl_like.plugins.verl_agents.runner import AgentLoops
from verl_like.plugins.verl_agents.start import loop_names
from verl_like.trainer.compose import compose

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]
MULTI = "actor_rollout_ref.rollout.multi_turn"
SOURCE = """
    from verl.workers.rollout.chat_scheduler import CompletionCallback

    class AskAgain(CompletionCallback):
        async def __call__(self, messages, completions, info):
            choice = completions.choices[0]
            messages.append({"role": "assistant", "content": choice.message.content})
            if len(messages) < 4:
                self.scheduler.submit_chat_completions(
                    messages=messages + [{"role": "user", "content": "Sure?"}], request_id=completions.id, info=info
                )

    class Rewrites(CompletionCallback):
        @property
        def extra_body(self):
            return {"temperature": 0.5, "include_stop_str_in_output": True}

        async def __call__(self, messages, completions, info):
            if info["__depth__"] == 1:
                messages.append({"role": "user", "content": f"Shorter than {completions.choices[0].message.content}?"})
                self.scheduler.submit_chat_completions(messages=messages, request_id=completions.id, info=info)

    class Twice(CompletionCallback):
        async def __call__(self, messages, completions, info):
            for _ in range(2):
                self.scheduler.submit_chat_completions(messages=messages, request_id=completions.id, info=info)
"""
TOOLS = """
    tools:
      - class_name: calculator
"""


@contextmanager
def callback(folder: Path, reference: str, *overrides: str, response: int = 200) -> Iterator[AgentLoops]:
    (folder / "callbacks.py").write_text(textwrap.dedent(SOURCE))
    reference = reference.replace("callbacks.py", str(folder / "callbacks.py"))
    config = compose(
        ["data.train_files=x", "actor_rollout_ref.rollout.name=hf", "data.max_prompt_length=2000",
         f"data.max_response_length={response}", f"{MULTI}.completion_callback={reference}", *overrides]
    )  # fmt: skip
    encoder = pickle.dumps(PromptEncoder(Letters(), {}))
    spec = AgentLoopSpec(callback=reference, encoder=encoder, settings=to_dict(config), timeout=30.0)
    names = loop_names(config.actor_rollout_ref.rollout)
    loops = AgentLoops(
        spec, num_workers=1, names=names, default=names[0], others=SingleTurn(), prompt=2000, response=response,
        turn_rewards=False,
    )  # fmt: skip
    with closing(loops):
        yield loops


def test_what_it_appends_is_read_and_not_trained_on(tmp_path: Path) -> None:
    policy = Policy(Letters(), "It is 42.", "Yes.", end=END)
    with callback(tmp_path, "callbacks.py:AskAgain") as loops:
        episode = asyncio.run(loops.run(prompt(), 0, policy))
    assert episode.failure is None and episode.info["num_turns"] == 4
    first, second = episode.turns
    assert not second.new_row and [first.sampled.token_ids.tolist(), second.sampled.token_ids.tolist()] == policy.said
    assert context_of(episode.turns) == policy.asked[1]
    written = Letters().apply_chat_template(
        [
            {"role": "user", "content": "6*7?"},
            {"role": "assistant", "content": "It is 42."},
            {"role": "user", "content": "Sure?"},
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert policy.asked[1] == written


def test_changed_history_begins_a_row(tmp_path: Path) -> None:
    policy = Policy(Letters(), "It is 42.", "42", end=END)
    with callback(tmp_path, "callbacks.py:Rewrites") as loops:
        episode = asyncio.run(loops.run(prompt(), 0, policy))
    assert len(episode.rows()) == 2 and episode.turns[1].new_row
    assert "Shorter than It is 42.?" in "".join(map(chr, policy.asked[1]))
    assert [given.temperature for given in policy.told] == [0.5, 0.5]


def test_the_shipped_callback_calls_tools(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(textwrap.dedent(TOOLS))
    call = {"name": "calculator", "arguments": {"expression": "6*7"}}
    policy = Policy(Letters(), f"<tool_call>{json.dumps(call)}</tool_call>", "It is 42.", end=END)
    shipped = "verl.workers.rollout.chat_scheduler.ToolCompletionCallback"
    with callback(tmp_path, shipped, f"{MULTI}.tool_config_path={tmp_path / 'tools.yaml'}") as loops:
        episode = asyncio.run(loops.run(prompt(), 0, policy))
    assert episode.failure is None and len(episode.turns) == 2
    assert "tool\n42" in "".join(map(chr, policy.asked[1][len(policy.asked[0]) :]))


def test_what_goes_wrong(tmp_path: Path) -> None:
    with callback(tmp_path, "callbacks.py:Twice") as loops:
        episode = asyncio.run(loops.run(prompt(), 0, Policy(Letters(), "a", end=END)))
        assert episode.failure is not None and "more than one conversation" in episode.failure.message
    with (
        pytest.raises(AgentLoopError, match=r"(?s)completion_callback=.*no such name 'Missing'"),
        callback(tmp_path, "callbacks.py:Missing"),
    ):
        pass


def test_it_answers_rows_without_an_agent() -> None:
    rollout = RolloutConfig()
    rollout.multi_turn.completion_callback = "my.callbacks.AskAgain"
    assert loop_names(rollout) == ["completion_callback"]
