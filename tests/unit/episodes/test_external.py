"""rollout.name=openai: what is asked, what comes back, and what happens when the endpoint misbehaves."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.unit.episodes.gateway.test_gateway import Policy, rules
from tests.unit.episodes.test_tool_agent import TOKENIZER, prompt
from tests.unit.rewards.test_judge import Endpoint
from tests.unit.rewards.test_judge import endpoint as endpoint
from verl_like.config.endpoint import EndpointConfig
from verl_like.episodes.episode import Episode
from verl_like.plugins.agents.external import ExternalChat
from verl_like.plugins.agents.gateway.server import GatewayServer
from verl_like.plugins.agents.gateway.session import Session
from verl_like.plugins.http_json import ServiceError
from verl_like.rollout.rollout_engine import SamplingParams

pytestmark = pytest.mark.timeout(60)
KEY = "sk-open-sesame"


class Asks:
    """An Ask that has sampling parameters, and is never asked."""

    def __init__(self, **sampling: Any) -> None:
        self.sampling = SamplingParams(**{"max_tokens": 40, **sampling})

    async def __call__(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("no engine")


@pytest.fixture
def chat(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExternalChat]:
    monkeypatch.setenv("OUTSIDE_KEY", KEY)
    quick = {"timeout": 0.5, "retry_delay": 0.01, "max_retries": 2}
    made = ExternalChat(
        EndpointConfig(url=endpoint.url, model="big", api_key_env="OUTSIDE_KEY", **quick), TOKENIZER, seed=7
    )
    yield made
    made.close()


def one(answering: Coroutine[Any, Any, Episode]) -> Episode:
    return asyncio.run(answering)


def text_of(episode: Episode) -> str:
    return TOKENIZER.decode(episode.response_ids(), skip_special_tokens=True)


def test_this_projects_own_gateway_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real server: chat template, token counts, the limit of an answer, and a key that opens nothing."""
    policy = Policy(lambda context: f"{context.count('user')} says hi")

    async def talk() -> None:
        with closing(GatewayServer()) as server:
            await server.start()
            monkeypatch.setenv("OUTSIDE_KEY", server.open(Session(rules(), policy)))
            config = EndpointConfig(url=f"{server.url}/v1/", api_key_env="OUTSIDE_KEY")
            with closing(ExternalChat(config, TOKENIZER, seed=None)) as chat:
                whole, cut = await asyncio.gather(
                    *(chat.run(prompt(), sample, Asks(max_tokens=most)) for sample, most in enumerate((40, 4)))
                )
                assert text_of(whole) == "1 says hi"
                assert (whole.turns[0].finish_reason, whole.turns[0].observation_ids) == ("stop", prompt().ids)
                assert (cut.turns[0].finish_reason, text_of(cut)) == ("length", "1 sa")
            monkeypatch.setenv("OUTSIDE_KEY", "sk-stolen-elsewhere")
            with closing(ExternalChat(config, TOKENIZER, seed=None)) as stranger:
                with pytest.raises(ServiceError, match=r"HTTP 401: .*is no session's") as caught:
                    await stranger.run(prompt(), 0, Asks())
                assert "stolen" not in str(caught.value)

    asyncio.run(talk())
    assert policy.asked[0] == "".join(map(chr, prompt().ids))  # the same template made the same prompt of the messages


def test_what_is_sent_is_what_is_set(endpoint: Endpoint, chat: ExternalChat) -> None:
    one(chat.run(prompt(), 0, Asks(do_sample=False, top_p=0.5, stop_token_ids=(3,))))
    one(chat.run(prompt(), 1, Asks(temperature=0.7, top_p=0.9, top_k=5, stop=("x",), repetition_penalty=1.1)))
    one(chat.run(prompt(), 1, Asks(temperature=0.7)))
    greedy, sampled, again = endpoint.bodies
    messages = prompt().row.messages
    seed = greedy.pop("seed")
    assert greedy == {"model": "big", "messages": messages, "max_tokens": 40, "temperature": 0}
    assert sampled["seed"] == again["seed"] != seed and 0 <= seed < 2**31
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop": ["x"], "repetition_penalty": 1.1}
    assert {name: sampled[name] for name in sampled.keys() - {"model", "messages", "max_tokens", "seed"}} == given
    assert endpoint.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_trouble_is_tried_again_and_then_costs_one_episode(
    endpoint: Endpoint, chat: ExternalChat, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.faults = [(500, ""), (429, ""), (200, "no JSON"), (503, ""), (200, '{"choices": []}'), (400, "too long")]
    assert one(chat.run(prompt(), 0, Asks())).failure is not None  # 500, 429, no JSON
    endpoint.faults.insert(0, (503, ""))
    kept = one(chat.run(prompt(), 0, Asks()))
    assert kept.failure is not None and "no chat completion" in kept.failure.message
    lost = one(chat.run(prompt(), 0, Asks()))
    assert lost.failure is not None and (lost.failure.kind, lost.failure.outcome) == ("endpoint", "environment_error")
    assert "HTTP 400: too long" in lost.failure.message and lost.response_ids() == []
    assert text_of(one(chat.run(prompt(), 0, Asks()))) == "Yes"
    endpoint.pause = 1.0  # longer than it waits
    late = one(chat.run(prompt(), 0, Asks()))
    assert late.failure is not None and "failed 3 times; the last: TimeoutError" in late.failure.message
    assert not caplog.records


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_no_prompt_can_be_asked_ends_it_all_without_the_key(
    endpoint: Endpoint, chat: ExternalChat, status: int
) -> None:
    endpoint.faults = [(status, f"Incorrect API key provided: {KEY}.")]
    with pytest.raises(ServiceError, match=rf"HTTP {status}: Incorrect API key provided: \*\*\*\.") as caught:
        one(chat.run(prompt(), 0, Asks()))
    assert KEY not in str(caught.value) and len(endpoint.bodies) == 1


def test_an_answer_that_the_tokenizer_cannot_write_is_told_once(
    endpoint: Endpoint, chat: ExternalChat, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.answer = lambda text: "<|im_end|>special"  # which graders do not read
    for _ in range(2):
        one(chat.run(prompt(), 0, Asks()))
    assert [r.message.partition(":")[0] for r in caplog.records] == [
        "the tokenizer here cannot write an answer exactly"
    ]


def test_images_and_missing_keys_are_refused(chat: ExternalChat) -> None:
    seen = prompt()
    with pytest.raises(ServiceError, match="rows have images"):
        one(chat.run(dataclasses.replace(seen, row=dataclasses.replace(seen.row, media=[None])), 0, Asks()))  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"rollout\.openai\.api_key_env=NO_SUCH: there is no such environment"):
        ExternalChat(EndpointConfig(url="http://h", api_key_env="NO_SUCH"), TOKENIZER, seed=None)
