"""A public agent framework, unmodified, behind the gateway."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.episodes.gateway.test_gateway import Policy, served, written
from verl_like.plugins.agents.gateway.session import Session

PACKAGE = "smolagents==1.26.0"


@pytest.fixture
def smolagents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """In a folder of its own, without what it needs beyond our own packages."""
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1", "--timeout", "10"]
    run = subprocess.run([*line, "--target", str(tmp_path), PACKAGE], capture_output=True, text=True, timeout=120)
    if run.returncode != 0:
        pytest.skip(f"pip cannot fetch {PACKAGE}: {run.stderr.strip()[-200:]}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("smolagents")


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.engines
def test_an_agent_of_smolagents_is_an_episode(smolagents: Any) -> None:
    steps = [call("double", '{"number": 21}'), call("final_answer", '{"answer": "42"}')]
    policy = Policy(lambda context: steps[min(context.count("assistant\n") - 1, 1)])
    found: list[Any] = []

    @smolagents.tool
    def double(number: int) -> int:
        """Twice the number.

        Args:
            number: to be doubled
        """
        found.append(number)
        return 2 * number

    async def talk(url: str, key: str, session: Session) -> None:
        model = smolagents.OpenAIModel(model_id="policy", api_base=f"{url}/v1", api_key=key)
        agent = smolagents.ToolCallingAgent(tools=[double], model=model, max_steps=3, verbosity_level=0)
        found.append(await asyncio.to_thread(agent.run, "Double 21."))

    _, turns = served(policy, talk, total=200_000, response=400)
    assert found == [21, "42"] and len(policy.asked) == 2
    assert "".join(written(turns)) == f"{steps[0]}<|im_end|>{steps[1]}<|im_end|>"
