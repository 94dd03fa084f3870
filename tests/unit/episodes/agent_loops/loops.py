"""A policy that says what it is told, and the agent loops of a file that is written for one test."""

from __future__ import annotations

import asyncio
import pickle
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from verl_like.batch import Prompt, PromptRow
from verl_like.config.schema import to_dict
from verl_like.data.chat import PromptEncoder
from verl_like.episodes.episode import Ask, Episode, SingleTurn, Turn
from verl_like.plugins.verl_agents.loading import read_loops
from verl_like.plugins.verl_agents.messages import AgentLoopSpec
from verl_like.plugins.verl_agents.runner import AgentLoops
from verl_like.rollout.rollout_engine import Completion, Sampled, SamplingParams
from verl_like.trainer.compose import compose

R = "actor_rollout_ref.rollout"


class Policy:
    """Says these things, one for each request, in the order of asking. wait: what is done before each answer."""

    def __init__(
        self, tokenizer: Any, *says: str, end: int, wait: Callable[[int], Awaitable[None]] | None = None
    ) -> None:
        self.sampling = SamplingParams(max_tokens=100, stop_token_ids=(end,))
        self.says, self.tokenizer, self.end, self.wait = list(says), tokenizer, end, wait
        self.asked: list[list[int]] = []
        self.told: list[SamplingParams] = []
        self.said: list[list[int]] = []

    async def __call__(
        self,
        context_ids: list[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        media: Any = None,
    ) -> Completion:
        number = len(self.asked)
        self.asked.append(list(context_ids))
        self.told.append(sampling or self.sampling)
        ids = [*self.tokenizer.encode(self.says[number]), self.end][:max_tokens]
        self.said.append(ids)
        if self.wait is not None:
            await self.wait(number)
        sampled = Sampled.of(ids, [-0.5 - number] * len(ids), 7)
        return Completion(request_id="x", sampled=sampled, finish_reason="stop")


def prompt(agent: str = "", text: str = "6*7?", **fields: Any) -> Prompt:
    row = PromptRow(index=0, data_source="x", messages=[{"role": "user", "content": text}], agent=agent, **fields)
    return Prompt(ids=[1, 2], row=row, group=5, position=0)


@contextmanager
def agent_loops(
    folder: Path,
    tokenizer: Any,
    targets: dict[str, str] | Path,
    *overrides: str,
    source: str = "",
    num_workers: int = 1,
    timeout: float = 30.0,
    turn_rewards: bool = False,
    response: int = 200,
) -> Iterator[AgentLoops]:
    """The loops `targets` (name -> file:class, or a file that lists them) in workers. source: a file loops.py."""
    listed = targets if isinstance(targets, Path) else folder / "agents.yaml"
    if not isinstance(targets, Path):
        (folder / "loops.py").write_text(textwrap.dedent(source))
        entries = "".join(f"- name: {name}\n  _target_: {target}\n" for name, target in targets.items())
        listed.write_text(entries.replace("loops.py", str(folder / "loops.py")))
    lengths = ("data.max_prompt_length=2000", f"data.max_response_length={response}")
    config = compose(["data.train_files=x", f"{R}.name=hf", *lengths, *overrides])
    spec = AgentLoopSpec(
        config_path=str(listed),
        encoder=pickle.dumps(PromptEncoder(tokenizer, {})),
        settings=to_dict(config),
        timeout=timeout,
    )
    names = list(read_loops(spec.config_path))
    loops = AgentLoops(
        spec,
        num_workers=num_workers,
        names=names,
        default=names[0],
        others=SingleTurn(),
        prompt=2000,
        response=response,
        turn_rewards=turn_rewards,
    )
    with closing(loops):
        yield loops


def run(loops: AgentLoops, ask: Ask, asked: Prompt | None = None) -> Episode:
    """One episode of the default loop."""
    return asyncio.run(loops.run(asked or prompt(), 0, ask))


def context_of(turns: Sequence[Turn]) -> list[int]:
    """The tokens before the last of these turns' answers."""
    ids: list[int] = []
    for turn in turns[:-1]:
        ids += [*turn.observation_ids, *turn.sampled.token_ids.tolist()]
    return [*ids, *turns[-1].observation_ids]


def said(tokenizer: Any, episode: Episode) -> str:
    """The last row after its prompt."""
    return tokenizer.decode(episode.response_ids(), skip_special_tokens=False)
