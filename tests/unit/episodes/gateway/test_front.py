"""What stands between the gateway and whoever reaches its port: keys, bounds, time limits, the type of every field."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import threading
import time
from typing import Any

import httpx
import pytest

from tests.unit.episodes.gateway.test_gateway import TOOL, Policy, count_up, served, user, written
from tests.unit.episodes.gateway.test_requests import CALL, CHAT, FUNCTION, INPUT_TOOL, MESSAGES, RESPONSES, bodies
from verl_like.plugins.agents.gateway import schema, server
from verl_like.plugins.agents.gateway.session import Refused, Session
from verl_like.rollout.rollout_engine import Completion

BAD = {"a text": 5, "true or false": "yes", "a whole number": 1.5, "a number": "x", "an object": [1]}
PYTHON = ("NoneType", "Traceback", "dict", "True", "None", "unhashable", "attribute", "object has no", "'int'")


def misfits(field: Any, where: str = "") -> list[tuple[str, Any]]:
    """Of each field of a schema: its path, and a value of another type in the smallest body that leads there."""
    if isinstance(field, tuple):
        return [(where, 5), *(found for each in field if not isinstance(each, str) for found in misfits(each, where))]
    if isinstance(field, str):
        return [(where, BAD[field])]
    if isinstance(field, list):
        return [(where, {"a": 1}), *((path, [value]) for path, value in misfits(field[0], f"{where}[0]"))]
    found: list[tuple[str, Any]] = [(where, True)] if where else []
    for key, inner in field.items():
        name = key.removesuffix("!")
        others = {other[:-1]: smallest(value) for other, value in field.items() if other.endswith("!") and other != key}
        path = f"{where}.{name}" if where else name
        found += [(at, others | {name: value}) for at, value in misfits(inner, path)]
    return found


def smallest(field: Any) -> Any:
    if isinstance(field, tuple | list):
        return smallest(field[0]) if isinstance(field, tuple) else []
    return {"a text": "x", "an object": {}}[field] if isinstance(field, str) else {}


@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, schema.CHAT), (MESSAGES, schema.MESSAGES), (RESPONSES, schema.RESPONSES)]
)
def test_a_wrong_type_anywhere_is_a_400_that_names_the_field(
    path: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    cases = misfits(fields)
    assert len(cases) > 40

    async def talk(url: str, key: str, session: Session) -> None:
        async with httpx.AsyncClient(headers={"x-api-key": key}) as client:
            for field, body in cases:
                answer = await client.post(url + path, json=bodies(path) | body)
                error = answer.json()["error"]
                assert answer.status_code == 400 and error["message"].startswith(f"{field} must be "), (field, error)
                assert not any(word in error["message"] for word in PYTHON), error
                if path == MESSAGES:
                    assert answer.json()["type"] == "error" and set(error) == {"type", "message"}
                else:
                    assert error["param"] == field and error["code"] == "invalid_request_error"

    with caplog.at_level(logging.INFO):
        served(Policy(count_up), talk)
    assert not [record for record in caplog.records if record.exc_info or "gateway" in record.name]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"messages": ' + b"[" * 100_000, "more than 100 levels"),
        (b'{"messages": [' + b"{}," * 200_000 + b"{}]}", "more than 100000 items"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "a number has 10000 digits"),
        (b'{"temperature": 1e999}', "1e999 is no number"),
        (b'{"temperature": -Infinity}', "-Infinity is no number"),
        (b'{"n": 1, "n": 2}', "n stands twice"),
        (b'{"messages": "\xff"}', "the body is not UTF-8"),
        (b'{"messages": [}', "the body is not JSON"),
        (b"[]", "the body must be an object, not a list"),
        (b"", "the body is not JSON"),
        (b"{}", "messages is missing"),
    ],
)
def test_what_is_no_request_is_refused_before_it_costs_anything(body: bytes, told: str) -> None:
    began = time.process_time()
    with pytest.raises(Refused, match=told):
        schema.read(bytearray(body), schema.CHAT)
    assert time.process_time() - began < 1


def test_half_an_emoji_is_a_replacement_character_and_brackets_in_texts_are_text() -> None:
    body = bytearray(b'{"messages": [{"role": "user", "content": "a\\ud83d b \\\\ \\" ' + b"[{," * 60_000 + b'"}]}')
    content = schema.read(body, schema.CHAT)["messages"][0]["content"]
    assert content == 'a\ufffd b \\ " ' + "[{," * 60_000
    emoji = json.dumps({"messages": [user("\N{GRINNING FACE}")]}).encode()
    assert schema.read(bytearray(emoji), schema.CHAT)["messages"][0]["content"] == "\N{GRINNING FACE}"


async def raw(url: str, sent: bytes, wait_s: float = 5.0) -> bytes:
    """All that comes back until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), wait_s)
    finally:
        writer.close()


def test_bodies_are_neither_unpacked_nor_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEADERS_S", 0.3)
    monkeypatch.setattr(server, "_BODY_S", 0.3)
    monkeypatch.setattr(server, "_LINGER_S", 0.1)
    packed = gzip.compress(json.dumps(bodies(CHAT)).encode())

    async def talk(url: str, key: str, session: Session) -> None:
        async with httpx.AsyncClient(headers={"Content-Encoding": "gzip"}) as client:
            known = await client.post(url + CHAT, content=packed, headers={"x-api-key": key})
            stranger = await client.post(url + CHAT, content=packed)
        assert (known.status_code, stranger.status_code) == (415, 401) and "compressed" in known.text
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\n"
        assert await raw(url, b"POST /v1") == b"", "half a request"
        assert (await raw(url, f"{head}Content-Length: 9\r\n\r\n{{".encode())).startswith(b"HTTP/1.1 408 ")
        assert (await raw(url, f"{head}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n".encode())).startswith(
            b"HTTP/1.1 408"
        )
        unread = head.replace(key, "sk-guess") + "Content-Length: 999999999\r\n\r\n{"
        assert (await raw(url, unread.encode())).startswith(b"HTTP/1.1 401 ")

    served(Policy(count_up), talk)


def test_who_has_said_nothing_gives_place_to_who_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 8)

    async def talk(url: str, key: str, session: Session) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])) for _ in range(20)]
        async with httpx.AsyncClient(headers={"x-api-key": key}) as client:
            assert (await client.post(url + CHAT, json=bodies(CHAT))).status_code == 200
        ended = await asyncio.gather(
            *(asyncio.wait_for(reader.read(), 2) for reader, _ in silent), return_exceptions=True
        )
        assert sum(not isinstance(each, TimeoutError) for each in ended) in (12, 13), "the rest stays, and the one asks"
        for _, writer in silent:
            writer.close()

    served(Policy(count_up), talk)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"tools": [FUNCTION], "tool_choice": "required"}),
        (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "add"}}}),
        (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}),
        (RESPONSES, {"tools": [{"type": "function", **TOOL}], "tool_choice": {"type": "function", "name": "add"}}),
        (MESSAGES, {"tools": [INPUT_TOOL], "tool_choice": {"type": "any"}}),
        (MESSAGES, {"tools": [INPUT_TOOL], "tool_choice": {"type": "tool", "name": "add"}}),
    ],
)
def test_a_demanded_call_is_made_or_refused(path: str, more: dict[str, Any]) -> None:
    """The first answer with a call of the tool that is demanded is the answer; no other is shown or trained on."""
    serves = more["tool_choice"] != {"type": "allowed_tools"}
    answers = iter(["no", CALL.replace("add", "sub"), CALL, "no", "no", "no", "no", "no", CALL])

    async def talk(url: str, key: str, session: Session) -> None:
        async with httpx.AsyncClient(headers={"x-api-key": key}) as client:
            first, second = [await client.post(url + path, json=bodies(path, **more)) for _ in range(2)]
            unknown = await client.post(url + path, json=bodies(path, **(more | {"tools": []})))
        assert first.status_code == (200 if serves else 400) and (not serves or '"add"' in first.text)
        for refused in (second, unknown):
            assert refused.status_code == 400 and "tool_choice" in refused.json()["error"]["message"]

    policy = Policy(lambda context: next(answers))
    session, turns = served(policy, talk)
    assert len(policy.asked) == (7 if serves else 0) and session.counts["uncalled_answers"] == (6 if serves else 0)
    assert written(turns) == [f"{CALL}<|im_end|>"] if serves else turns == []


def test_a_demand_may_be_taken_for_an_open_choice() -> None:
    async def talk(url: str, key: str, session: Session) -> None:
        async with httpx.AsyncClient(headers={"x-api-key": key}) as client:
            answer = await client.post(url + CHAT, json=bodies(CHAT, tools=[FUNCTION], tool_choice="required"))
        assert answer.json()["choices"][0]["message"]["content"] == "no"

    served(Policy(lambda context: "no"), talk, forced_as_auto=True)


def test_the_policy_is_asked_in_the_episodes_loop_and_nothing_else_is_done_there() -> None:
    """A request of the largest size is read, rendered and tokenised while this loop goes on."""
    threads = set[str]()

    class Here(Policy):
        async def __call__(self, *arguments: Any, **options: Any) -> Completion:
            threads.add(threading.current_thread().name)
            return await super().__call__(*arguments, **options)

    async def talk(url: str, key: str, session: Session) -> None:
        stall = 0.0

        async def look() -> None:
            nonlocal stall
            while True:
                begun = time.perf_counter()
                await asyncio.sleep(0.005)
                stall = max(stall, time.perf_counter() - begun)

        looking = asyncio.ensure_future(look())
        body = json.dumps(bodies(CHAT, messages=[user("x y " * 200_000)])).encode()
        async with httpx.AsyncClient(headers={"x-api-key": key}, timeout=60) as client:
            answer = await client.post(url + CHAT, content=body)
            assert (await client.post(url + CHAT, json=bodies(CHAT))).status_code == 200
        looking.cancel()
        assert answer.json()["error"]["code"] == "context_length_exceeded" and stall < 0.5

    _, turns = served(Here(count_up), talk, total=20_000)
    assert threads == {threading.main_thread().name} and written(turns) == ["answer 1<|im_end|>"]


def test_bad_http_is_json_and_who_expects_to_be_asked_on_is() -> None:
    async def talk(url: str, key: str, session: Session) -> None:
        def head(length: str, more: str = "") -> bytes:
            return f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\n{length}\r\n{more}\r\n".encode()

        chunked = head("Transfer-Encoding: chunked")
        for sent in (
            head("Content-Length: -1"),
            head("Content-Length: 5", "Content-Length: 6\r\n"),
            b"\x16\x03\x01",
            chunked + b"zz\r\n",
        ):
            answer = await raw(url, sent)
            status, _, body = answer.partition(b"\r\n\r\n")
            assert status.startswith(b"HTTP/1.1 400 ") or status.startswith(b"HTTP/1.0 400 "), answer
            assert json.loads(body)["error"]["message"].startswith("no request that can be read: ")
        body = json.dumps(bodies(CHAT)).encode()
        expects = f"Content-Length: {len(body)}"
        answer = await raw(url, head(expects, "Expect: 100-continue\r\nConnection: close\r\n") + body)
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
        assert (await raw(url, head(expects, "Expect: x\r\nConnection: close\r\n") + body)).startswith(b"HTTP/1.1 417 ")

    served(Policy(count_up), talk)


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (CHAT, {"stop": [str(number) for number in range(65)]}, "stop"),
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
        (CHAT, {"best_of": 10**9}, "best_of"),
        (CHAT, {"regex": "a+"}, "regex"),
        (CHAT, {"min_tokens": 5}, "min_tokens"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "function_call", "arguments": "[" * 30_000}]}, "input[0].arguments"),
        (MESSAGES, {"messages": [{"role": "x", "content": "a"}]}, "messages[0]"),
        (MESSAGES, {"tools": [{"type": "web", "name": "a"}]}, "tools[0].type"),
    ],
)
def test_more_than_can_be_served_is_a_400_that_names_the_field(path: str, more: dict[str, Any], field: str) -> None:
    async def talk(url: str, key: str, session: Session) -> None:
        async with httpx.AsyncClient(headers={"x-api-key": key}) as client:
            answer = await client.post(url + path, json=bodies(path) | more)
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(field), answer.text

    served(Policy(count_up), talk)


def test_slow_and_idle_clients_of_one_session_keep_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 8)

    async def talk(url: str, key: str, session: Session) -> None:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nContent-Length: 200000\r\n\r\n"
        models = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\n\r\n"
        others = []
        for sent in (*[head] * 5, *[models] * 9):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(sent.encode())
            others.append(writer)
            if sent == models:
                await reader.readline()
        own = gateway.open(Session(session.rules, session._ask))
        async with httpx.AsyncClient(headers={"x-api-key": own}, timeout=5) as client:
            body = json.dumps(bodies(CHAT, metadata={"a": "b" * 80_000}))
            assert (await client.post(url + CHAT, content=body)).status_code == 200
        gateway.end(own)
        for writer in others:
            writer.close()

    opened = server.GatewayServer.start
    gateway: Any = None

    async def start(self: Any) -> None:
        nonlocal gateway
        gateway = self
        await opened(self)

    monkeypatch.setattr(server.GatewayServer, "start", start)
    served(Policy(count_up), talk)
