"""A base URL that trains: the official clients, unmodified, against a policy whose every token is known."""

from __future__ import annotations

import asyncio
import importlib
import json
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.unit.episodes.test_tool_agent import END, TOKENIZER, prompt
from verl_like.data.chat import PromptEncoder
from verl_like.episodes.episode import Episode, EpisodeAborted
from verl_like.episodes.rows import assemble_rollouts
from verl_like.heartbeat import EPISODE
from verl_like.plugins.agents.gateway.program import ProgramSpec
from verl_like.plugins.agents.gateway.runner import Gateway
from verl_like.plugins.agents.gateway.server import GatewayServer
from verl_like.plugins.agents.gateway.session import Asked, Refused, Rules, Session
from verl_like.plugins.agents.tool_calls.formats import parser_of
from verl_like.rollout.rollout_engine import Completion, Sampled, SamplingParams

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def anthropic() -> Any:
    """The client's module. Imported above, it would cost each process that collects these tests two seconds."""
    return importlib.import_module("anthropic")


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Before time limits begin to run."""
    anthropic()


class Policy:
    """Says what `says` gives for a context; waits for `gate` first. asked: contexts as text."""

    sampling = SamplingParams(max_tokens=100)

    def __init__(self, says: Callable[[str], str]) -> None:
        self.says, self.asked, self.limits, self.episodes = says, list[str](), list[int | None](), list[str]()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(
        self,
        context_ids: list[int],
        sampling: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        media: Any = None,
    ) -> Completion:
        self.asked.append("".join(map(chr, context_ids)))
        self.limits.append(max_tokens)
        self.episodes.append(EPISODE.get())
        await self.gate.wait()
        ids = [*TOKENIZER.encode(self.says(self.asked[-1])), END]
        cut = max_tokens is not None and len(ids) > max_tokens
        sampled = Sampled.of(ids[:max_tokens], [-0.5] * len(ids[:max_tokens]), 3)
        return Completion(request_id="x", sampled=sampled, finish_reason="length" if cut else "stop")


def rules(**options: Any) -> Rules:
    plain: dict[str, Any] = {"response": 300, "total": 2000, "end_ids": frozenset([END])}
    return Rules(encoder=PromptEncoder(TOKENIZER, {}), parser=parser_of("hermes"), **(plain | options))


def served(
    policy: Policy, talk: Callable[[str, str, Session], Awaitable[None]], **options: Any
) -> tuple[Session, list[Any]]:
    """The session after `talk(url, key, session)`, and its turns."""

    async def go() -> tuple[Session, list[Any]]:
        with closing(GatewayServer()) as server:
            await server.start()
            session = Session(rules(**options), policy)
            key = server.open(session)
            try:
                await asyncio.wait_for(talk(server.url, key, session), 60)
            finally:
                server.end(key)
            return session, session.turns()

    return asyncio.run(go())


def written(turns: list[Any]) -> list[str]:
    """Of each row: what is trained on."""
    episode = Episode(turns=tuple(turns))
    rollouts = assemble_rollouts([prompt()], [[episode]])
    rows = zip(rollouts.response_ids_BR, rollouts.response_mask_BR, strict=True)
    return [TOKENIZER.decode(ids[mask].tolist(), skip_special_tokens=False) for ids, mask in rows]


def count_up(context: str) -> str:
    """Says how many answers there are already."""
    return f"answer {context.count('assistant')}"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_conversation_over_openais_client_is_one_row_of_sampled_tokens() -> None:
    policy = Policy(count_up)

    async def talk(url: str, key: str, session: Session) -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        messages: list[Any] = [user("Hi")]
        for number in range(3):
            answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=50, temperature=0)
            choice = answer.choices[0]
            assert choice.message.content == f"answer {number + 1}" and choice.finish_reason == "stop"
            assert answer.usage is not None and answer.usage.completion_tokens == len("answer 1") + 1
            messages += [choice.message.model_dump(exclude_none=True), user(f"again {number}")]
        assert [model.id async for model in client.models.list()] == ["policy"]

    _, turns = served(policy, talk)
    assert written(turns) == ["answer 1<|im_end|>answer 2<|im_end|>answer 3<|im_end|>"]
    assert policy.limits == [50, 50, 50]
    ids = [*turns[0].observation_ids]
    for place, turn in enumerate(turns):  # what was sent is what was sampled before, token by token
        ids += [] if place == 0 else list(turn.observation_ids)
        assert "".join(map(chr, ids)) == policy.asked[place]
        ids += turn.sampled.token_ids.tolist()
    assert turns[2].sampled.weight_versions.tolist() == [3] * 9 and np.allclose(turns[2].sampled.log_probs, -0.5)


def test_half_a_surrogate_pair_and_marks_that_some_take_for_line_ends() -> None:
    """What a client cuts out of an emoji is a mark for the model; httpx cuts a stream's lines at U+2028 too."""
    policy = Policy(lambda context: "a\u2028b\x85c")

    async def talk(url: str, key: str, session: Session) -> None:
        body = {"model": "m", "messages": [user("cut \ud83d")], "stream": True}
        body["tools"] = [{"type": "function", "function": {**TOOL, "description": "\ude00"}}]
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        said = ""
        async with (
            httpx.AsyncClient(headers=headers) as client,
            client.stream("POST", f"{url}/v1/chat/completions", content=json.dumps(body)) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    delta = json.loads(line.removeprefix("data: "))["choices"]
                    said += (delta[0]["delta"].get("content") or "") if delta else ""
        assert said == "a\u2028b\x85c"

    served(policy, talk)
    assert "cut \ufffd" in policy.asked[0]


def test_requests_belong_to_their_episode_in_logs() -> None:
    policy = Policy(count_up)

    async def talk(url: str, key: str, session: Session) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
            await client.chat.completions.create(model="policy", messages=[user("Hello.")])

    def named() -> None:
        EPISODE.set("train-3-1")
        served(policy, talk)

    copy_context().run(named)
    assert policy.episodes == ["train-3-1"]


def test_tool_calls_of_three_protocols_and_streams_go_on_in_one_row() -> None:
    def says(context: str) -> str:
        return "done" if "42" in context else CALL

    async def chat(url: str, key: str, session: Session) -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        tools: list[Any] = [{"type": "function", "function": TOOL}]
        messages: list[Any] = [user("Add.")]
        stream = await client.chat.completions.create(model="m", messages=messages, tools=tools, stream=True)
        calls: list[Any] = []
        async for chunk in stream:
            calls += [call for choice in chunk.choices for call in choice.delta.tool_calls or []]
        (call,) = calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        function = {"name": "add", "arguments": '{"a":1}'}  # as another library would write it
        messages += [{"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "42"}]
        answer = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        assert answer.choices[0].message.content == "done"

    async def responses(url: str, key: str, session: Session) -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        tools: list[Any] = [{"type": "function", **TOOL}]
        first = await client.responses.create(model="m", input="Add.", tools=tools)
        (call,) = first.output
        assert call.type == "function_call" and json.loads(call.arguments) == {"a": 1}
        output: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
        events = []
        async with client.responses.stream(
            model="m", input=output, previous_response_id=first.id, tools=tools
        ) as stream:
            async for event in stream:
                events.append(event.type)
            assert (await stream.get_final_response()).output_text == "done"
        assert events[0] == "response.created" and events[-1] == "response.completed"

    async def messages(url: str, key: str, session: Session) -> None:
        client = anthropic().AsyncAnthropic(base_url=url, api_key=key)
        tool = {"name": "add", "description": "Adds.", "input_schema": TOOL["parameters"]}
        said: list[Any] = [user("Add.")]
        first = await client.messages.create(model="m", max_tokens=90, messages=said, tools=[tool])  # type: ignore[list-item]
        assert first.stop_reason == "tool_use" and first.content[0].input == {"a": 1}  # type: ignore[union-attr]
        result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "42"}  # type: ignore[union-attr]
        said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        async with client.messages.stream(model="m", max_tokens=90, messages=said, tools=[tool]) as stream:  # type: ignore[list-item]
            assert [text async for text in stream.text_stream] == ["done"]
            assert (await stream.get_final_message()).stop_reason == "end_turn"

    for talk in (chat, responses, messages):
        session, turns = served(Policy(says), talk)
        assert written(turns) == [f"{CALL}<|im_end|>done<|im_end|>"], talk.__name__
        assert session.counts["new_rows"] == 0 and session.counts["calls"] > 0


def test_branches_summaries_and_a_second_agent_are_rows_and_nothing_is_trained_on_twice() -> None:
    policy = Policy(lambda context: f"said {context.count('x')}")

    async def talk(url: str, key: str, session: Session) -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)

        async def ask(*messages: Any) -> dict[str, Any]:
            answer = await client.chat.completions.create(model="m", messages=list(messages))
            return answer.choices[0].message.model_dump(exclude_none=True)

        first = await ask(user("x"))
        await asyncio.gather(*(ask(user("x"), first, user("x" * n)) for n in (2, 3)))  # branches, in parallel
        await ask({"role": "system", "content": "You check."}, user("xxxxx"))  # another agent
        await ask(user("summary: x"), user("x"))  # compaction
        await asyncio.gather(ask(user("xxxxxxx")), ask(user("xxxxxxx")))  # the same twice, meant so

    session, turns = served(policy, talk)
    rows = written(turns)
    assert sorted(rows) == sorted(
        ["said 1<|im_end|>said 3<|im_end|>", "said 4<|im_end|>", "said 5<|im_end|>", "said 2<|im_end|>"]
        + ["said 7<|im_end|>"] * 2
    ) or sorted(rows) == sorted(
        ["said 1<|im_end|>said 4<|im_end|>", "said 3<|im_end|>", "said 5<|im_end|>", "said 2<|im_end|>"]
        + ["said 7<|im_end|>"] * 2
    )
    assert session.counts["new_rows"] == 5 and len(policy.asked) == 7


def test_a_retry_joins_the_first_ones_future_also_through_a_pause() -> None:
    policy = Policy(count_up)

    async def talk(url: str, key: str, session: Session) -> None:
        policy.gate.clear()  # the engine is away: it loads weights
        hurried = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=0.3, max_retries=2)
        with pytest.raises(openai.APITimeoutError):
            await hurried.chat.completions.create(model="m", messages=[user("Hi")])
        patient = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        waiting = asyncio.ensure_future(patient.chat.completions.create(model="m", messages=[user("Hi")]))
        await asyncio.sleep(0.2)
        assert session.waiting == 1
        policy.gate.set()
        assert (await waiting).choices[0].message.content == "answer 1"

    session, turns = served(policy, talk)
    assert len(policy.asked) == 1 and written(turns) == ["answer 1<|im_end|>"]
    assert session.counts["joined_requests"] == 3


def test_only_an_open_session_gets_in_and_what_is_wrong_is_told_without_a_retry() -> None:
    policy = Policy(count_up)

    async def talk(url: str, key: str, session: Session) -> None:
        assert url.startswith("http://127.0.0.1:")
        stranger = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-guess")
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model="m", messages=[user("Hi")])
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        with pytest.raises(openai.BadRequestError, match="n=2: one answer a request"):
            await client.chat.completions.create(model="m", messages=[user("Hi")], n=2)
        picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        with pytest.raises(openai.BadRequestError, match="'image_url' is not available"):
            await client.chat.completions.create(model="m", messages=picture)
        with pytest.raises(anthropic().BadRequestError, match="messages is empty"):
            await (
                anthropic()
                .AsyncAnthropic(base_url=url, api_key=key)
                .messages.create(model="m", max_tokens=5, messages=[])
            )
        async with httpx.AsyncClient() as plain:
            broken = await plain.post(
                f"{url}/v1/chat/completions", content=b"{", headers={"Authorization": f"Bearer {key}"}
            )
        assert broken.status_code == 400 and "should-retry" in str(broken.headers)
        full = await client.chat.completions.create(model="m", messages=[user("y" * 3000)])
        assert full.choices[0].finish_reason == "length" and full.choices[0].message.content == ""
        with pytest.raises(openai.BadRequestError, match="maximum context length of 2000") as again:
            await client.chat.completions.create(model="m", messages=[user("y" * 3001)])
        assert again.value.code == "context_length_exceeded"
        await client.chat.completions.create(model="m", messages=[user("Hi")])
        with pytest.raises(openai.BadRequestError, match="has had its 3 requests"):
            await client.chat.completions.create(model="m", messages=[user("Ho")])

    session, turns = served(policy, talk, requests=3)
    assert len(policy.asked) == 1 and len(turns) == 1 and session.counts["out_of_tokens"] == 1


def test_equal_parallel_requests_count_and_all_end_with_the_session() -> None:
    async def go() -> None:
        policy = Policy(count_up)
        policy.gate.clear()
        session = Session(rules(requests=2), policy)
        asking = [asyncio.ensure_future(session.answer(Asked(messages=[user("Hi")]))) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert len(policy.asked) == session.waiting == 2 and isinstance(asking[2].exception(), Refused)
        session.close()
        await asyncio.sleep(0.05)
        assert session.waiting == 0
        assert [str(asked.exception()) for asked in asking[:2]] == ["the episode has ended"] * 2

    asyncio.run(go())


def test_a_response_id_of_another_episode_is_refused() -> None:
    async def go() -> None:
        with closing(GatewayServer()) as server:
            await server.start()
            keys = [server.open(Session(rules(), Policy(count_up))) for _ in range(2)]
            mine, other = (openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) for key in keys)
            first = await mine.responses.create(model="m", input="Hi")
            with pytest.raises(openai.BadRequestError, match="none of this episode's"):
                await other.responses.create(model="m", input="Ho", previous_response_id=first.id)
            answer = await mine.responses.create(model="m", input="Ho", previous_response_id=first.id)
            assert answer.output_text == "answer 2"

    asyncio.run(go())


def test_a_late_error_of_a_stream_is_an_event_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_like.plugins.agents.gateway.server._PING_S", 0.05)

    class Late(Policy):
        async def __call__(self, *arguments: Any, **options: Any) -> Completion:
            await asyncio.sleep(0.3)
            raise ValueError("too late")

    async def talk(url: str, key: str, session: Session) -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        chat = await client.chat.completions.create(model="m", messages=[user("Hi")], stream=True)
        with pytest.raises(openai.APIError, match="too late"):
            [chunk async for chunk in chat]
        responses = await client.responses.create(model="m", input="Hi", stream=True)
        with pytest.raises(openai.APIError, match="too late"):
            [event async for event in responses]
        other = anthropic().AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
        with pytest.raises(anthropic().APIStatusError, match="too late"):
            async with other.messages.stream(model="m", max_tokens=9, messages=[user("Hi")]) as stream:  # type: ignore[list-item]
                await stream.get_final_message()
        async with httpx.AsyncClient() as plain:  # one whole HTTP response, and no second one in it
            body = {"messages": [user("Ho")], "stream": True}
            answer = await plain.post(f"{url}/v1/chat/completions", json=body, headers={"x-api-key": key})
        assert answer.status_code == 200 and "HTTP/1.1" not in answer.text and answer.text.count("too late") == 1

    served(Late(count_up), talk)


PROGRAM = """
import asyncio, os, threading, time
from openai import AsyncOpenAI, OpenAI

async def run(data, base_url, api_key, **more):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    answer = await client.chat.completions.create(model="m", messages=data["messages"])
    what = data["extra_info"].get("what")
    if what == "raise":
        raise RuntimeError("no idea")
    if what == "exit":
        os._exit(3)
    if what == "hang":
        await asyncio.sleep(1000)
    if what == "none":
        return None
    return {"reward": 0.5, "said": answer.choices[0].message.content}

def blocking(data, base_url, api_key):
    client = OpenAI(base_url=base_url, api_key=api_key)
    answer = client.chat.completions.create(model="m", messages=data["messages"])
    return float(answer.choices[0].message.content == "answer 1")

async def stubborn(data, base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [*data["messages"], {"role": "user", "content": "y" * 3000}]
    while True:
        try:
            await client.chat.completions.create(model="m", messages=messages)
        except Exception as error:
            if data["extra_info"].get("what") != "deaf":
                return {"reward": 0, "code": error.code}

async def named(data, base_url, api_key, episode):
    return await run(data, base_url, api_key) | {"episode": episode}

everyone = threading.Barrier(40)

def together(data, base_url, api_key):
    everyone.wait(20)
    return blocking(data, base_url, api_key)

async def late(data, base_url, api_key):
    if data["extra_info"].get("what") == "busy":
        time.sleep(2.3)  # and with it everything in this process
    await asyncio.sleep(0.6)
    return await run(data, base_url, api_key)
"""
COMMAND = """
import json, os
from anthropic import Anthropic
data = json.load(open(os.environ["VERL_LIKE_DATA_FILE"], encoding="utf-8"))
answer = Anthropic().messages.create(model="m", max_tokens=20, messages=data["messages"])
print("thinking")
more = {"extra": data["extra_info"].get("what"), "prompt": data.get("prompt")}
more["episode"] = os.environ["VERL_LIKE_EPISODE"]
print(json.dumps({"reward": 0.25, "said": answer.content[0].text, **more}))
"""


@contextmanager
def gateway(folder: Path, timeout: float = 30.0, **where: Any) -> Iterator[Gateway]:
    (folder / "program.py").write_text(PROGRAM)
    (folder / "command.py").write_text(COMMAND)
    spec = ProgramSpec(timeout=timeout, **where)
    with closing(Gateway(spec, rules(), num_workers=1, host="127.0.0.1", port=0, timeout=timeout)) as made:
        yield made


def play(made: Gateway, policy: Any, *whats: str | None) -> list[Episode]:
    """Episodes of rows with these extra_info.what, all at once."""

    async def go() -> list[Episode]:
        rows = [prompt(extra_info={} if what is None else {"what": what}) for what in whats]
        return await asyncio.gather(*(made.run(row, 0, policy) for row in rows))

    return asyncio.run(go())


def test_programs_end_in_rewards_or_in_named_failures(tmp_path: Path) -> None:
    with gateway(tmp_path, path=f"{tmp_path / 'program.py'}:run") as made:
        good, none, bad = play(made, Policy(count_up), None, "none", "raise")
        assert good.reward == 0.5 and good.info == {"said": "answer 1", "num_turns": 2} and good.failure is None
        assert none.reward is None and none.failure is None, "graders are asked"
        assert bad.failure is not None and bad.failure.kind == "agent_program_exception"
        assert "no idea" in bad.failure.message
        (lost,) = play(made, Policy(count_up), "exit")
        assert lost.failure is not None and lost.failure.kind == "agent_program_crash"
        assert play(made, Policy(count_up), None)[0].reward == 0.5, "another process is there"
        made._timeout = 0.5
        (hung,) = play(made, Policy(count_up), "hang")
        assert hung.failure is not None and hung.failure.kind == "agent_program_timeout"


def test_programs_are_told_the_name_of_their_episode(tmp_path: Path) -> None:
    async def episode(made: Gateway, name: str) -> Episode:
        EPISODE.set(name)
        return await made.run(prompt(extra_info={}), 0, Policy(count_up))

    async def go(made: Gateway) -> list[str]:
        tasks = [asyncio.create_task(episode(made, name)) for name in ("train-3-0", "train-3-1")]
        return [(await task).info["episode"] for task in tasks]

    for where in (
        {"path": f"{tmp_path / 'program.py'}:named"},
        {"command": f"{sys.executable} {tmp_path / 'command.py'}"},
    ):
        with gateway(tmp_path, **where) as made:
            assert asyncio.run(go(made)) == ["train-3-0", "train-3-1"], where


def test_functions_and_command_lines(tmp_path: Path) -> None:
    with gateway(tmp_path, path=f"{tmp_path / 'program.py'}:blocking") as made:
        episodes = play(made, Policy(count_up), None, None)
    assert [episode.reward for episode in episodes] == [1.0, 1.0]
    with gateway(tmp_path, command=f"{sys.executable} {tmp_path / 'command.py'}") as made:
        (episode,) = play(made, Policy(count_up), "long é" * 50_000)
    assert episode.reward == 0.25 and episode.info["said"] == "answer 1"
    assert episode.info["extra"] == "long é" * 50_000 and episode.info["prompt"] is None, "messages has it"
    with gateway(tmp_path, command=f"{sys.executable} -c 'raise SystemExit(4)'") as made:
        (episode,) = play(made, Policy(count_up), None)
    assert episode.failure is not None and "ended with 4" in episode.failure.message


def test_a_command_is_over_when_it_ends_whatever_it_left_in_the_background(tmp_path: Path) -> None:
    left = tmp_path / "left"
    line = f"{sys.executable} {tmp_path / 'command.py'}; sleep 77 & echo $! > {left}; echo 0.75"
    with gateway(tmp_path, command=f"sh -c {shlex.quote(line)}") as made:
        made._timeout = 10.0
        (episode,) = play(made, Policy(count_up), None)
    assert episode.reward == 0.75
    state = Path(f"/proc/{left.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z", "it is killed with the command's group"


def test_each_plain_function_has_a_thread_of_its_own(tmp_path: Path) -> None:
    with gateway(tmp_path, path=f"{tmp_path / 'program.py'}:together") as made:
        episodes = play(made, Policy(count_up), *[None] * 40)
    assert [episode.reward for episode in episodes] == [1.0] * 40, "none began before all had"


def test_a_program_that_asks_for_ever_with_a_full_context_ends(tmp_path: Path) -> None:
    with gateway(tmp_path, path=f"{tmp_path / 'program.py'}:stubborn") as made:
        (told,) = play(made, policy := Policy(count_up), None)
        made._timeout = 1.0
        (deaf,) = play(made, policy, "deaf")
    assert told.failure is not None and told.failure.kind == "agent_program_output", "it ended by itself"
    assert deaf.failure is not None and deaf.failure.kind == "agent_program_timeout"
    assert policy.asked == []


def test_the_time_before_a_program_begins_is_not_counted(tmp_path: Path) -> None:
    async def go(made: Gateway) -> Episode:
        busy = asyncio.ensure_future(made.run(prompt(extra_info={"what": "busy"}), 0, Policy(count_up)))
        await asyncio.sleep(0.2)
        queued = await made.run(prompt(extra_info={}), 0, Policy(count_up))
        await busy
        return queued

    with gateway(tmp_path, path=f"{tmp_path / 'program.py'}:late") as made:
        made._timeout = 2.0
        assert asyncio.run(go(made)).reward == 0.5


def test_an_engine_that_is_gone_ends_the_run_and_not_an_episode(tmp_path: Path) -> None:
    class Gone(Policy):
        async def __call__(self, *arguments: Any, **options: Any) -> Completion:
            raise EpisodeAborted("nobody wants it")

    with gateway(tmp_path, path=f"{tmp_path / 'program.py'}:run") as made, pytest.raises(EpisodeAborted):
        play(made, Gone(count_up), None)


def test_a_program_that_cannot_be_called_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def run(data): ...\n")
    with pytest.raises(ValueError, match=r"gateway\.path=.*cannot be called"):
        Gateway(
            ProgramSpec(path=f"{tmp_path / 'bad.py'}:run"), rules(), num_workers=1, host="127.0.0.1", port=0, timeout=9
        )
