"""The conversations of docs/rollout.md, as they stand there."""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.unit.episodes.fleet import collector, dataset
from verl_like.kit.bench.fake_time import tokens_of
from verl_like.rollout.client import RolloutClient
from verl_like.rollout.rollout_engine import GenerationRequest, SamplingParams

PAGE = Path(__file__).parents[3] / "docs" / "rollout.md"


def code(name: str) -> dict[str, Any]:
    """What the block that defines this name defines."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if name in b)
    space: dict[str, Any] = {"GenerationRequest": GenerationRequest}
    exec(compile(block, str(PAGE), "exec"), space)
    return space


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]


def test_the_conversation_is_an_episode_of_three_turns(tmp_path: Path) -> None:
    runner = code("class Conversation")["Conversation"](Tokenizer())
    with collector(dataset(tmp_path), runner=runner, sampling=SamplingParams(max_tokens=8)) as (made, fleet):
        rollouts, pending = made.next_batch(1)
        rollouts.check()
        assert rollouts.step_BR is not None and int(rollouts.step_BR.max()) == 2 and len(pending.result()) == 8
        again = [ord(c) for c in "\nAre you sure? "]
        first = rollouts.response_ids_BR[0].tolist()
        assert first[8 : 8 + len(again)] == again and not rollouts.response_mask_BR[0, 8 : 8 + len(again)].any()
        asked = [r for r in fleet.asked if r.request_id.startswith("train-0-0-")]
        assert [len(r.prompt_ids) - len(asked[0].prompt_ids) for r in asked] == [0, 8 + len(again), 16 + 2 * len(again)]


def test_the_client_alone_converses(tmp_path: Path) -> None:
    converse = code("def converse")["converse"]

    def work(client: RolloutClient) -> Future[list[list[int]]]:
        answers: Future[list[list[int]]] = Future()

        def talk() -> None:
            answers.set_result(converse(client, [1, 2, 3], [[7, 8], [9]], SamplingParams(max_tokens=5)))

        threading.Thread(target=talk).start()
        return answers

    with collector(dataset(tmp_path)) as (_, fleet):
        assert fleet.sample(work) == [tokens_of(turn, 5).tolist() for turn in range(3)]
        assert fleet.asked[-1].prompt_ids[3:8] == tokens_of(0, 5).tolist() and fleet.asked[-1].turn == 2
