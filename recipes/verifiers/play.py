"""Plays environments of Prime Intellect's verifiers (0.1), unmodified, behind the gateway.

    rollout.gateway.path=recipes/verifiers/play.py:run               # verifiers is installed beside verl_like
    rollout.gateway.command="OTHER/bin/python recipes/verifiers/play.py"       # or in an environment of its own

Rows are those of prepare.py: extra_info.verifiers has the environment's name, its arguments and one of its examples.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from pathlib import Path
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient

_PATIENCE_S = 3600.0  # of a request: the engine may take new weights meanwhile


@functools.cache
def environment(name: str, arguments: str) -> vf.Environment:
    """Loaded once in each process. ValueError for one that scores whole groups: here episodes are scored one by one."""
    loaded = vf.load_environment(name, **json.loads(arguments))
    if loaded.requires_group_rollouts:
        raise ValueError(f"{name} compares the episodes of a group to score them, which cannot be done one by one")
    return loaded


async def run(data: dict[str, Any], base_url: str, api_key: str, **more: Any) -> dict[str, Any]:
    """One episode: its reward by the environment's rubric, and the rubric's parts. An error of the environment is
    raised: the episode is lost then, and has no reward of 0."""
    chosen = data["extra_info"]["verifiers"]
    played = environment(chosen["name"], chosen["arguments"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=_PATIENCE_S) as openai:
        client = OpenAIChatCompletionsClient(openai)
        ended = await played.run_rollout(json.loads(chosen["example"]), client, "policy", {})
    if ended["error"]:
        raise RuntimeError(f"{chosen['name']}: {ended['error']}")
    return {**ended["metrics"], "reward": float(ended["reward"])}  # a part may have that name too


def main() -> None:
    """The same as a command: the row in VERL_LIKE_DATA_FILE, the reward as the last line."""
    data = json.loads(Path(os.environ["VERL_LIKE_DATA_FILE"]).read_text())
    reward = asyncio.run(run(data, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
    print(json.dumps(reward), flush=True)
    os._exit(0)  # nothing that ends with the process may print behind it


if __name__ == "__main__":
    main()
