"""What is sent again, after an answer was lost or a server was another, and what ends in the midst of its work."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tinker_server.fake import Tenant, run, running
from tests.unit.tinker_server.test_service import KEYS
from verl_like.plugins.tinker_server.store import Store


def test_what_an_earlier_server_took_is_the_same_request(tmp_path: Path) -> None:
    """Its digest of a snapshot had the number that a client which sends again counts on; that of no other request."""

    async def go() -> None:
        body: dict[str, Any] = {"seq_id": 1, "sampling_session_seq_id": 0}
        async with running(tmp_path) as server:
            tenant = await Tenant(server).begin()
            body["model_id"] = tenant.model
            told = await tenant.result(await tenant.call("save_weights_for_sampler", body))
            named = {**body, "seq_id": 2, "path": "named"}
            await tenant.result(await tenant.call("save_weights_for_sampler", named))
            server.service.store.change("UPDATE requests SET digest = x'00'")
            server.service.store.change("PRAGMA user_version = 0")
        async with running(tmp_path) as server:
            again = await server.post("save_weights_for_sampler", body | {"sampling_session_seq_id": 1})
            assert await Tenant(server).result(again[1]) == told
            assert (await server.post("save_weights_for_sampler", named))[0] == 400

    run(go())


def test_calls_without_a_number_are_made_once_by_their_key(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path, keys=KEYS) as server:
            ann, bob = [await Tenant(server, key).begin() for key in KEYS.values()]
            await ann.act("save")
            await ann.act("snapshot")

            async def send(method: str, path: str, key: str, who: Tenant = ann, **body: Any) -> tuple[int, str]:
                headers = {"X-API-Key": who.key, "X-Idempotency-Key": key}
                sent = server.http.request(method, f"/api/v1/{path}", json=body, headers=headers)
                async with sent as response:
                    return response.status, await response.text()

            sessions = [await send("POST", "create_session", "a", who) for who in (ann, ann, bob)]
            assert sessions[0] == sessions[1] != sessions[2]
            join = {"sampling_session_id": ann.sampler}
            joined = [json.loads((await send("POST", "join_sampling_session", key, **join))[1]) for key in "aab"]
            assert [each["client_counter"] for each in joined] == [1, 1, 2]
            path = f"training_runs/{ann.model}/checkpoints/weights/s1"
            assert [(await send("DELETE", path, key))[0] for key in "aab"] == [204, 204, 404]

    run(go())


class Slow:
    """A call of the engines that waits, once it has begun, until it is let go on."""

    def __init__(self, engines: Any, name: str) -> None:
        self._call, self.begun, self.go_on = getattr(engines, name), threading.Event(), threading.Event()
        setattr(engines, name, self)

    def __call__(self, *values: Any, **named: Any) -> Any:
        self.begun.set()
        self.go_on.wait()
        return self._call(*values, **named)


def test_an_orderly_end_is_no_try(tmp_path: Path) -> None:
    """A server that is told to end in the midst of a sample breaks it off; it is computed however often that was."""

    async def go() -> None:
        async with running(tmp_path) as server:
            tenant = await Tenant(server).begin()
            await tenant.act("snapshot")
            slow = Slow(server.engines, "sample")
            server.engines.cancel = lambda _: slow.go_on.set()
            future = await tenant.call(*tenant.body_of("sample", 1))
            await asyncio.to_thread(slow.begun.wait)
            tries = "SELECT tries FROM requests WHERE id = ?"
            assert server.service.store.value(tries, future["request_id"]) == 1, "where it is killed, it was one"
        with closing(Store(tmp_path)) as store:
            assert store.value(tries, future["request_id"]) == 0
        async with running(tmp_path) as server:
            tenant.server = server
            assert isinstance(await tenant.result(future), bytes)

    run(go())


@pytest.mark.parametrize(("act", "call"), [("snapshot", "saver"), ("pass", "forward_backward")])
def test_what_a_session_was_making_when_it_ended_goes_too(tmp_path: Path, act: str, call: str) -> None:
    async def go() -> None:
        async with running(tmp_path) as server:
            tenant, slow = await Tenant(server).begin(), Slow(server.engines, call)
            future = await tenant.call(*tenant.body_of(act, 1))
            await asyncio.to_thread(slow.begun.wait)
            await server.post(f"sessions/{tenant.session}/finish", {})
            slow.go_on.set()
            await tenant.result(future)
            await asyncio.sleep(0.01)
            assert tenant.model not in server.engines.models
            assert not list(tmp_path.glob(f"saved/{tenant.model.replace(':', '_')}/*"))

    run(go())
