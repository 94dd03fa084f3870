"""verl's own agent loops, out of its wheels and unedited, with the stand-ins of what else of verl they import."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.factory import SHARED_DATA
from tests.unit.episodes.agent_loops.loops import Policy, R, agent_loops, context_of, prompt, run, said
from verl_like.episodes.episode import Episode
from verl_like.plugins.verl_agents.runner import AgentLoops

pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

FOLDER = "experimental/agent_loop"
FILES = {
    "0.5.0": (f"{FOLDER}/single_turn_agent_loop.py", f"{FOLDER}/tool_agent_loop.py", "tools/gsm8k_tool.py"),
    "0.7.0": (
        *(f"{FOLDER}/single_turn_agent_loop.py", f"{FOLDER}/tool_agent_loop.py", "tools/gsm8k_tool.py"),
        "interactions/gsm8k_interaction.py",
    ),
    "0.9.1": (f"{FOLDER}/single_turn_agent_loop.py", f"{FOLDER}/tool_agent_loop.py"),
}
TARGETS = {
    "tools": "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop",
    "single": "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop",
}
TOOLS = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: submit
        description: Submits an answer.
        parameters:
          type: object
          properties:
            answer: {type: string, description: The answer}
          required: [answer]
"""
INTERACTION = """
interaction:
  - name: gsm8k
    class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
    config: {}
"""
FUNCTIONS = '''
from verl.tools.function_tool import function_tool

@function_tool
def submit(answer: str) -> str:
    """Submits an answer.

    Args:
        answer: The answer
    """
    return f"{answer} it is"
'''
CALL = '<tool_call>\n{"name": "submit", "arguments": {"answer": "72"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    if not (SHARED_DATA / "tok_qwen25").is_dir():
        pytest.skip(f"needs the tokenizer in {SHARED_DATA / 'tok_qwen25'}")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SHARED_DATA / "tok_qwen25")


@pytest.fixture(scope="module")
def loops_of(
    wheels: dict[str, Path], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], AgentLoops]]:
    """The agent loops of a version, in a worker that is started once."""
    started: dict[str, AgentLoops] = {}
    with ExitStack() as stack:

        def start(version: str) -> AgentLoops:
            if version not in started:
                folder = tmp_path_factory.mktemp("verl")
                with zipfile.ZipFile(wheels[version]) as wheel:
                    for file in FILES[version]:
                        wheel.extract(f"verl/{file}", folder)
                settings = settings_of(folder, version)
                with pytest.MonkeyPatch.context() as patch:  # workers get the trainer's path
                    patch.syspath_prepend(str(folder))
                    loops = agent_loops(folder, tokenizer, TARGETS, *settings, timeout=60.0)
                    started[version] = stack.enter_context(loops)
            return started[version]

        yield start


def settings_of(folder: Path, version: str) -> list[str]:
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "tools.yaml").write_text(TOOLS)
    (folder / "users.yaml").write_text(INTERACTION)
    if version == "0.9.1":
        return [f"{R}.multi_turn.function_tool_path={folder / 'functions.py'}"]
    users = [f"{R}.multi_turn.interaction_config_path={folder / 'users.yaml'}"] if version == "0.7.0" else []
    return [f"{R}.multi_turn.tool_config_path={folder / 'tools.yaml'}", *users]


def checked(ask: Policy, episode: Episode) -> None:
    """Each turn is exactly what was sampled, after exactly what was sent; nothing else is trained on."""
    assert episode.failure is None, episode.failure
    assert [turn.sampled.token_ids.tolist() for turn in episode.turns] == ask.said
    assert [context_of(episode.turns[: k + 1]) for k in range(len(ask.asked))] == ask.asked
    assert episode.counts["unsampled_tokens"] == 0 and episode.counts["cut_tokens"] == 0


@pytest.mark.parametrize("version", ["0.5.0", "0.7.0", "0.9.1"])
def test_the_loop_of_one_turn(loops_of: Callable[[str], AgentLoops], tokenizer: Any, version: str) -> None:
    loops, ask = loops_of(version), Policy(tokenizer, "72.", end=tokenizer.eos_token_id)
    episode = run(loops, ask, prompt("single"))
    checked(ask, episode)
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "6*7?"}], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(ask.asked[0]) == whole
    assert said(tokenizer, episode) == "72.<|im_end|>" and episode.info["num_turns"] == 2


@pytest.mark.parametrize(
    ("version", "answer", "between"),
    [
        ("0.5.0", "Current parsed answer='72' reward=0.0", ""),  # it leaves out the template's separator
        ("0.9.1", "72 it is", "\n"),
    ],
)
def test_the_loop_with_tools(
    loops_of: Callable[[str], AgentLoops], tokenizer: Any, version: str, answer: str, between: str
) -> None:
    loops, ask = loops_of(version), Policy(tokenizer, CALL, "It is 72.", end=tokenizer.eos_token_id)
    episode = run(loops, ask, prompt("tools"))
    checked(ask, episode)
    assert "Submits an answer." in tokenizer.decode(ask.asked[0])  # the schema, as the template renders it
    assert said(tokenizer, episode) == (
        f"{CALL}<|im_end|>{between}<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is 72.<|im_end|>"
    )
    assert episode.info["num_turns"] == 4


def test_the_loop_with_tools_and_a_simulated_user(loops_of: Callable[[str], AgentLoops], tokenizer: Any) -> None:
    """0.7.0: the tool answers the call, the user the rest; their rewards reach the graders."""
    ask = Policy(tokenizer, CALL, "#### 71", "#### 72", end=tokenizer.eos_token_id)
    extra = {
        "tools_kwargs": {"submit": {"create_kwargs": {"create_kwargs": {"ground_truth": "72"}}}},
        "interaction_kwargs": {"name": "gsm8k", "ground_truth": "72"},
    }
    episode = run(loops_of("0.7.0"), ask, prompt("tools", extra_info=extra))
    checked(ask, episode)
    text = said(tokenizer, episode)
    assert "Current parsed answer='72' reward=" in text and "Your response is incorrect!" in text
    assert text.endswith("#### 72<|im_end|>")  # what the user says at the end is not the policy's to read
    assert episode.info["turn_scores"] == [0.0, 1.0] and len(episode.info["tool_rewards"]) == 1
