"""What clients ask of the gateway beside plain conversations: each field does what it says, or is refused in the form
of its API; nothing hangs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest

from tests.unit.episodes.gateway.test_gateway import (
    CALL,
    TOOL,
    Policy,
    anthropic,
    count_up,
    imported,  # noqa: F401 (a fixture)
    served,
    user,
    written,
)
from tests.unit.episodes.test_tool_agent import TOKENIZER
from verl_like.plugins.agents.gateway.session import Session
from verl_like.rollout.rollout_engine import Completion, Sampled, SamplingParams

TOOL_USE = {"type": "tool_use", "id": "a", "name": "add", "input": {}}

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
FUNCTION = {"type": "function", "function": TOOL}
INPUT_TOOL = {"name": "add", "description": "Adds.", "input_schema": TOOL["parameters"]}


class Stopping(Policy):
    """Ends at the texts that stop, which its tokens have."""

    async def __call__(
        self, context_ids: list[int], sampling: SamplingParams | None = None, **options: Any
    ) -> Completion:
        whole = await super().__call__(context_ids, sampling, **options)
        text = self.says(self.asked[-1])
        for stop in sampling.stop if sampling else ():
            if stop in text:
                ids = TOKENIZER.encode(text[: text.index(stop) + len(stop)])
                return Completion(request_id="x", sampled=Sampled.of(ids, [-0.5] * len(ids), 3), finish_reason="stop")
        return whole


def bodies(path: str, **more: Any) -> dict[str, Any]:
    plain: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [user("Hi")]},
        MESSAGES: {"messages": [user("Hi")], "max_tokens": 90},
        RESPONSES: {"input": "Hi"},
    }
    return plain[path] | more


@pytest.mark.parametrize(
    ("path", "more", "told"),
    [
        (CHAT, {"logprobs": True}, "logprobs is not available"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions is not available"),
        (CHAT, {"response_format": {"type": "json_object"}}, "type 'json_object' is not available"),
        (CHAT, {"stop": ["a", None]}, "stop[1] must be a text, not null"),
        (CHAT, {"stop": ""}, None),
        (CHAT, {"stop": [""]}, "must be a text or a list of texts"),
        (CHAT, {"max_tokens": True}, "max_tokens must be a whole number, not true"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "type 'custom' is not available"),
        (CHAT, {"tools": [{"type": "function", "function": {}}]}, "must be a function with a name"),
        (CHAT, {"tools": "add"}, "tools must be a list of objects"),
        (CHAT, {"messages": [{"role": "player", "content": "x"}]}, "the role 'player': there are system, user"),
        (CHAT, {"messages": 5}, "messages must be a list of objects"),
        (
            CHAT,
            {"messages": [user("x"), {"role": "assistant", "tool_calls": ["x"]}]},
            "messages[1].tool_calls[0] must be an o",
        ),
        (CHAT, {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0] must be an object"),
        (CHAT, {"messages": [user("x" * 600_000)]}, "far more than the maximum context length of 2000 tokens"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' is not"),
        (MESSAGES, {"messages": [user("x"), {"role": "assistant", "content": [TOOL_USE]}]}, "the policy cannot go"),
        (MESSAGES, {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0] must be an object"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "type 'json_schema' is not available"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "logprobs is not available"),
        (RESPONSES, {"background": True}, "background is not available"),
        (RESPONSES, {"input": [5]}, "input[0] must be an object, not 5"),
    ],
)
def test_what_there_is_not_is_refused_in_words(path: str, more: dict[str, Any], told: str | None) -> None:
    async def talk(url: str, key: str, session: Session) -> None:
        async with httpx.AsyncClient(headers={"x-api-key": key}) as client:
            answer = await client.post(url + path, json=bodies(path, **more))
        assert answer.status_code == (200 if told is None else 400)
        if told is not None:
            assert told in answer.json()["error"]["message"]
            assert answer.json()["error"]["type"] in ("invalid_request_error", "context_length_exceeded")
            assert (answer.json().get("type") == "error") == (path == MESSAGES)

    policy = Policy(count_up)
    served(policy, talk)
    assert bool(policy.asked) == (told is None)


def test_whatever_is_sent_the_answer_is_of_the_apis_form() -> None:
    sent: list[tuple[str, str, bytes, int]] = [
        ("POST", CHAT, b"[" * 200_000, 400),
        ("POST", MESSAGES, b"\xff\xfe\x00", 400),
        ("POST", "/v1/embeddings", b"{}", 404),
        ("POST", "/v1/messages/count_tokens", b"{}", 404),
        ("GET", CHAT, b"", 405),
        ("POST", CHAT, b" " * (65 << 20), 413),
    ]

    async def talk(url: str, key: str, session: Session) -> None:
        async with httpx.AsyncClient(headers={"x-api-key": key}, timeout=30) as client:
            for method, path, body, status in sent:
                answer = await client.request(method, url + path, content=body)
                assert answer.status_code == status and answer.json()["error"]["type"] != "session_ended", path
                assert answer.headers["x-should-retry"] == "false"
                assert (answer.json().get("type") == "error") == path.startswith(MESSAGES)
        async with httpx.AsyncClient(headers={"Authorization": f"bearer {key}"}) as client:
            assert (await client.get(f"{url}/v1/models")).status_code == 200, "the scheme has no case"
        with pytest.raises(anthropic().AuthenticationError, match="authentication_error"):
            stranger = anthropic().AsyncAnthropic(base_url=url, api_key="sk-guess")
            await stranger.messages.create(**bodies(MESSAGES, model="m"))

    served(Policy(count_up), talk)


def test_a_text_that_stops_is_trained_on_and_not_shown() -> None:
    """As both APIs say: an agent that adds "Observation:" itself would otherwise have it twice."""
    policy = Stopping(lambda context: f"Thought {context.count('assistant')}\nObservation: dreamt")

    async def talk(url: str, key: str, session: Session) -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        messages: list[Any] = [user("Hi")]
        for number in (1, 2):
            answer = await client.chat.completions.create(model="m", messages=messages, stop=["Observation:", "\n\n"])
            assert answer.choices[0].message.content == f"Thought {number}\n"
            assert answer.choices[0].finish_reason == "stop"
            messages += [{"role": "assistant", "content": f"Thought {number}"}, user("Observation: none")]
        other = anthropic().AsyncAnthropic(base_url=url, api_key=key)
        said = await other.messages.create(model="m", max_tokens=90, messages=[user("Ho")], stop_sequences=["tion"])
        assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", "tion")
        assert said.content[0].text == "Thought 1\nObserva"  # type: ignore[union-attr]

    _, turns = served(policy, talk)
    assert written(turns) == ["Thought 1\nObservation:Thought 2\nObservation:", "Thought 1\nObservation"]


@pytest.mark.parametrize(
    ("says", "more", "calls", "content"),
    [
        (CALL, {"tools": [FUNCTION], "tool_choice": "none"}, 0, CALL),
        (CALL * 2, {"tools": [FUNCTION]}, 2, None),
        (CALL * 2, {"tools": [FUNCTION], "parallel_tool_calls": False}, 1, None),
        (CALL, {}, 0, CALL),
        ("<tool_call>{oops</tool_call>", {"tools": [FUNCTION]}, 0, "<tool_call>{oops</tool_call>"),
        (f"<think>so</think>{CALL}", {}, 0, CALL),
    ],
)
def test_calls_are_shown_to_those_who_can_make_them(
    says: str, more: dict[str, Any], calls: int, content: str | None
) -> None:
    async def talk(url: str, key: str, session: Session) -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        messages: list[Any] = [user("Add.")]
        first = (await client.chat.completions.create(model="m", messages=messages, **more)).choices[0].message
        assert len(first.tool_calls or []) == calls and first.content == content
        messages.append(first.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in first.tool_calls or []]
        await client.chat.completions.create(model="m", messages=[*messages, user("go on")], **more)

    session, turns = served(Policy(lambda context: says), talk)
    assert written(turns) == [f"{says}<|im_end|>" * 2] and session.counts["new_rows"] == 0


def test_anthropics_choices_of_tools() -> None:
    async def talk(url: str, key: str, session: Session) -> None:
        client = anthropic().AsyncAnthropic(base_url=url, api_key=key)
        for choice, kinds in (
            ({"type": "none"}, ["text"]),
            ({"type": "auto", "disable_parallel_tool_use": True}, ["tool_use"]),
            ({"type": "auto"}, ["tool_use", "tool_use"]),
        ):
            body: Any = bodies(MESSAGES, model="m", max_tokens=200, tools=[INPUT_TOOL], tool_choice=choice)
            answer = await client.messages.create(**body)
            assert [block.type for block in answer.content] == kinds

    served(Policy(lambda context: CALL * 2), talk)


def test_a_stream_has_its_usage_where_it_is_asked_for() -> None:
    """Programs take choices[0] of each chunk, which OpenAI's have unless usage was asked for."""

    async def talk(url: str, key: str, session: Session) -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        stream = await client.chat.completions.create(model="m", messages=[user("Hi")], stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "answer 1"
        stream = await client.chat.completions.create(
            model="m", messages=[user("Ho")], stream=True, stream_options={"include_usage": True}
        )
        *_, last = [chunk async for chunk in stream]
        assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == len("answer 1") + 1

    served(Policy(count_up), talk)


def test_a_request_with_another_limit_does_not_join_a_broken_one() -> None:
    policy = Policy(count_up)

    async def talk(url: str, key: str, session: Session) -> None:
        policy.gate.clear()
        hurried = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=0.3, max_retries=0)
        with pytest.raises(openai.APITimeoutError):
            await hurried.chat.completions.create(model="m", messages=[user("Hi")], max_tokens=3)
        policy.gate.set()
        patient = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        answer = await patient.chat.completions.create(model="m", messages=[user("Hi")], max_tokens=50)
        assert answer.choices[0].message.content == "answer 1"

    served(policy, talk)
    assert policy.limits == [3, 50]


def test_who_waits_when_the_episode_ends_is_told() -> None:
    policy = Policy(count_up)

    async def talk(url: str, key: str, session: Session) -> None:
        policy.gate.clear()
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        other = anthropic().AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
        waiting = [
            asyncio.ensure_future(client.chat.completions.create(model="m", messages=[user("Hi")])),
            asyncio.ensure_future(client.chat.completions.create(model="m", messages=[user("He")], stream=True)),
            asyncio.ensure_future(other.messages.create(**bodies(MESSAGES, model="m"))),
        ]
        while session.waiting < 3:
            await asyncio.sleep(0.02)
        session.close()
        for told in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(told, openai.BadRequestError | anthropic().BadRequestError)
            assert "the episode has ended" in str(told)

    served(policy, talk)


def test_the_time_of_a_long_history_is_linear() -> None:
    """Each prefix that ends with an answer may be ours: looking for it must not hash each from its start."""

    async def talk(url: str, key: str, session: Session) -> None:
        messages = [said for _ in range(3000) for said in (user("q" * 50), {"role": "assistant", "content": "a" * 50})]
        begun = time.process_time()
        async with httpx.AsyncClient(headers={"x-api-key": key}, timeout=60) as client:
            answer = await client.post(url + CHAT, json={"messages": [*messages, user("end")]})
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert time.process_time() - begun < 5

    served(Policy(count_up), talk)
