"""Order, futures, tenants, turns, and what a killed server knows when it begins again; all on fake engines."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tinker_server.fake import SHARED, Running, Tenant, pass_body, run, running
from verl_like.plugins.tinker_server.fair import FairQueue, Job
from verl_like.plugins.tinker_server.store import Store
from verl_like.rollout.rollout_engine import RolloutError

ACTS = ("pass", "pass", "forward", "step", "save", "snapshot", "sample")
KEYS = {"ann": "tml-the-key-of-ann", "bob": "tml-the-key-of-bob"}


def script_of(numbers: list[int]) -> list[tuple[str, int]]:
    """A client's acts; what is sampled from comes first."""
    return [("snapshot", 0), *((ACTS[number % len(ACTS)], number) for number in numbers)]


async def alone_once(folder: Path, acts: list[int]) -> tuple[list[Any], tuple[str, str]]:
    """What a script gives without company; each is computed once."""
    number = SCRIPTS.index(acts)
    if number not in _ALONE:
        _ALONE[number] = await alone(folder / f"alone{number}", script_of(acts))
    return _ALONE[number]


async def alone(folder: Path, script: list[tuple[str, int]]) -> tuple[list[Any], tuple[str, str]]:
    async with running(folder) as server:
        tenant = await Tenant(server).begin()
        return [plain(await tenant.act(*each), tenant) for each in script], tenant.weights()


def plain(answer: Any, tenant: Tenant) -> Any:
    """An answer without names that differ from session to session."""
    return answer if isinstance(answer, bytes) else json.dumps(answer).replace(tenant.session, "SESSION")


SCRIPTS = [[(7 * i * i + 3 * i * k + k) % 61 for k in range(2 + i % 6)] for i in range(12)]
scripts = st.sampled_from(SCRIPTS)
_ALONE: dict[int, Any] = {}


@settings(max_examples=200, deadline=None)
@given(ann=scripts, bob=scripts, order=st.lists(st.booleans(), max_size=20))
def test_interleaved_clients_get_what_each_gets_alone(ann: list[int], bob: list[int], order: list[bool]) -> None:
    async def both(folder: Path) -> None:
        expected = [await alone_once(folder, acts) for acts in (ann, bob)]
        async with running(folder / "both", keys=KEYS) as server:
            tenants = [await Tenant(server, key).begin() for key in KEYS.values()]
            left, told = [script_of(ann), script_of(bob)], ([], [])
            for first in [*order, *[True, False] * 20]:
                if left[first]:
                    told[first].append(plain(await tenants[first].act(*left[first].pop(0)), tenants[first]))
            found = [(answers, tenant.weights()) for answers, tenant in zip(told, tenants, strict=True)]
        assert found == expected

    with tempfile.TemporaryDirectory() as folder:
        run(both(Path(folder)))


@settings(max_examples=50, deadline=None)
@given(acts=scripts, call=st.integers(1, 12), worked=st.booleans())
def test_a_killed_server_goes_on_as_if_nothing_was(acts: list[int], call: int, worked: bool) -> None:
    """The call with that number never comes back, before or after its work; the client sends all it knows again."""
    script = script_of(acts)

    async def killed(folder: Path) -> None:
        expected = await alone_once(folder, acts)
        sent: list[tuple[str, Any]] = []
        told: list[Any] = []
        async with running(folder / "state", kill_at=(call, worked)) as server:
            tenant = await Tenant(server).begin()
            for each in script:
                sent.append(tenant.body_of(*each))
                future = await tenant.call(*sent[-1])
                waiting = asyncio.ensure_future(tenant.result(future))
                done, _ = await asyncio.wait({waiting, server.service.tasks[0]}, return_when="FIRST_COMPLETED")
                if waiting not in done:
                    waiting.cancel()
                    break
                told.append(plain(waiting.result(), tenant))
                if each[0] == "snapshot":
                    tenant.sampler = waiting.result()["sampling_session_id"]
        async with running(folder / "state") as server:
            tenant.server = server
            for path, body in sent[-1:]:  # the client does not know whether it arrived
                answer = await tenant.result(await tenant.call(path, body))
                if path == "save_weights_for_sampler":
                    tenant.sampler = answer["sampling_session_id"]
                told[len(sent) - 1 :] = [plain(answer, tenant)]
            told += [plain(await tenant.act(*each), tenant) for each in script[len(sent) :]]
            if tenant.model not in server.engines.models:  # nothing was asked of it since
                await tenant.act("forward", 1)
            assert (told, tenant.weights()) == expected

    with tempfile.TemporaryDirectory() as folder:
        run(killed(Path(folder)))


async def send(tenants: list[Tenant], scripts: list[list[int]]) -> list[list[tuple[str, Any]]]:
    """Send all of several scripts in turns while the engines are held, so that requests meet; return what was sent."""
    for tenant in tenants:
        await tenant.act("snapshot")
    held = threading.Event()
    tenants[0].server.thread.submit(held.wait)
    try:
        sent: list[list[tuple[str, Any]]] = [[] for _ in tenants]
        for number in range(max(map(len, scripts), default=0)):
            for tenant, script, bodies in zip(tenants, scripts, sent, strict=True):
                for each in script[number : number + 1]:
                    bodies.append(tenant.body_of(ACTS[each % len(ACTS)], each))
                    await tenant.call(*bodies[-1])
    finally:
        held.set()
    return sent


async def told(tenant: Tenant, sent: list[tuple[str, Any]]) -> tuple[list[Any], tuple[str, str]]:
    """What came of all that was sent (which is sent again), and the weights in the end."""
    found = [plain(await tenant.result(await tenant.call(*each)), tenant) for each in sent]
    await tenant.act("forward", 1)  # which brings the model into memory, where nothing else did
    return found, tenant.weights()


@settings(max_examples=30, deadline=None)
@given(ann=scripts, bob=scripts, kill=st.tuples(st.integers(4, 20), st.booleans()), most=st.sampled_from([20, 1000]))
def test_who_shares_passes_gets_what_each_gets_alone(
    ann: list[int], bob: list[int], kill: tuple[int, bool], most: int
) -> None:
    """Also where the server is killed in between, where a pass breaks off for one of them, and where few fit in."""

    async def go(folder: Path) -> None:
        expected = []
        for name, acts in (("ann", ann), ("bob", bob)):
            async with running(folder / name) as server:
                tenant = await Tenant(server).begin()
                expected.append(await told(tenant, (await send([tenant], [acts]))[0]))
        shared = dict.fromkeys(SHARED, most)
        async with running(folder / "state", keys=KEYS, shared=shared, max_models=1, kill_at=kill) as server:
            tenants = [await Tenant(server, key).begin() for key in KEYS.values()]
            sent = await send(tenants, [ann, bob])
            idle = asyncio.ensure_future(asyncio.gather(*(map(told, tenants, sent))))
            await asyncio.wait({idle, server.service.tasks[0]}, return_when="FIRST_COMPLETED")
            idle.cancel()
            SHARING.append(max(server.engines.shared, default=0))
        async with running(folder / "state", keys=KEYS, shared=shared) as server:
            for tenant in tenants:  # their numbers go on behind those that may have been asked for before the kill
                last = "SELECT coalesce(max(seq), 0) FROM requests WHERE model = ?"
                tenant.server, tenant.seq = server, server.service.store.value(last, tenant.model)
            assert [await told(*each) for each in zip(tenants, sent, strict=True)] == expected

    with tempfile.TemporaryDirectory() as folder:
        run(go(Path(folder)))


SHARING: list[int] = []


def test_passes_were_shared() -> None:
    assert max(SHARING) > 2, "of the examples before"


def test_requests_that_ended_a_server_are_computed_alone(tmp_path: Path) -> None:
    async def go() -> None:
        for start, kill in enumerate([(3, True), None]):
            async with running(tmp_path, keys=KEYS, shared=SHARED, kill_at=kill) as server:
                if not start:
                    tenants = [await Tenant(server, key).begin() for key in KEYS.values()]
                    held = threading.Event()
                    server.thread.submit(held.wait)
                    await tenants[0].call(*tenants[0].body_of("forward", 1))  # behind which the others meet
                    futures = [await each.call(*each.body_of("pass", 1)) for each in tenants for _ in range(2)]
                    held.set()
                    await asyncio.wait(server.service.tasks[:1], timeout=10)
                    assert server.engines.shared == [1, 4]
                else:
                    for tenant, future in zip((tenants[i // 2] for i in range(4)), futures, strict=True):
                        tenant.server = server
                        assert isinstance(await tenant.result(future), bytes)
                    assert set(server.engines.shared) == {1}

    run(go())


def test_a_step_whose_file_fails_fails_alone(tmp_path: Path) -> None:
    """Steps that wait are taken together, each once; the one without a file is undone, and its model goes on."""

    async def go() -> None:
        async with running(tmp_path, keys=KEYS, shared=SHARED, checkpoint_freq=1) as server:
            tenants = [await Tenant(server, key).begin() for key in KEYS.values()]
            before, saver = tenants[1].weights()[0], server.engines.saver

            def full() -> None:
                raise OSError("No space left on device")

            def broken(model: str, folder: Path, *, optimizer: bool) -> Any:
                return full if model == tenants[1].model else saver(model, folder, optimizer=optimizer)

            server.engines.saver = broken
            held = threading.Event()
            server.thread.submit(held.wait)
            await tenants[0].call(*tenants[0].body_of("forward", 1))  # behind which the others meet
            futures = [await each.call(*each.body_of(act, 1)) for each in tenants for act in ("pass", "step")]
            held.set()
            told = [await tenants[i // 2].result(future) for i, future in enumerate(futures)]
            assert "metrics" in told[1] and "No space left" in told[3]["error"]
            assert server.engines.calls.count("step") == 2 and server.engines.shared == [1, 2]
            assert told[1] == await tenants[0].result(futures[1]), "it is written down"
            server.engines.saver = saver
            await tenants[1].act("forward", 1)
            assert tenants[1].weights() == (before, "")

    run(go())


def test_models_that_are_many_leave_memory_and_come_back(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path, max_models=2) as server:
            tenants = [await Tenant(server).begin() for _ in range(3)]
            for _ in range(2):
                for tenant in tenants:
                    await tenant.act("pass", 1)
                    assert len(server.engines.models) <= 2
            await tenants[0].act("step", 0)
            found = tenants[0].weights()
        async with running(tmp_path / "alone") as server:
            tenant = await Tenant(server).begin()
            for each in ("pass", "pass", "step"):
                await tenant.act(each, int(each == "pass"))
            assert tenant.weights() == found

    run(go())


def test_a_tenant_with_many_models_has_its_own_leave_memory(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path, keys=KEYS, max_models=3) as server:
            names = list(KEYS.values())
            ann, *many = [await Tenant(server, key).begin() for key in (names[0], *[names[1]] * 4)]
            assert [each.model in server.engines.models for each in (ann, *many)] == [True, False, False, True, True]
            await many[0].act("pass", 1)
            assert [each.model in server.engines.models for each in (ann, *many)] == [True, True, False, False, True]
            await server.post(f"sessions/{many[0].session}/finish", {}, many[0].key)
            await many[1].act("pass", 1)
            assert [each.model in server.engines.models for each in (ann, *many)] == [True, False, True, False, True]

    run(go())


def test_bodies_that_wait_are_bounded(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path, keys=KEYS, max_queued_megabytes=1) as server:
            ann, bob = [await Tenant(server, key).begin() for key in KEYS.values()]

            async def ask(seq: int) -> int:  # of which the first never comes, so all others wait
                body = pass_body(ann.model, seq, loss_fn="x" * 60_000)
                return (await server.post("forward_backward", body, ann.key))[0]

            assert [await ask(seq) for seq in range(2, 21)] == [200] * 17 + [429] * 2
            assert "metrics" in await bob.act("step")

    run(go())


def test_requests_of_a_model_are_computed_by_their_numbers(tmp_path: Path) -> None:
    async def late_first(server: Running) -> None:
        tenant = await Tenant(server).begin()
        bodies = [tenant.body_of(act, 1) for act in ("pass", "pass", "step")]
        futures = [await tenant.call(*body) for body in reversed(bodies)]
        await asyncio.gather(*map(tenant.result, futures))
        assert server.engines.calls == ["save", "pass", "pass", "step"]
        again = await tenant.call(*bodies[0])
        assert again == futures[-1] and await tenant.result(again) == tenant.told[again["request_id"]]
        status, told = await server.post("forward_backward", pass_body(tenant.model, 1, (8, 8)))
        assert status == 400 and "sent before with another content" in told["detail"]
        assert server.engines.calls == ["save", "pass", "pass", "step"], "nothing is computed twice"

    async def go() -> None:
        async with running(tmp_path) as server:
            await late_first(server)

    run(go())


def test_a_step_over_a_gradient_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path) as server:
            tenant = await Tenant(server).begin()
            before = tenant.weights()
            await tenant.act("pass", 1)
            tenant.seq += 1
            wrong = await tenant.call("forward_backward", pass_body(tenant.model, tenant.seq, loss_fn="gspo"))
            assert (await tenant.result(wrong))["category"] == "user"
            refused = await tenant.act("step")
            assert "failed: no weight was changed" in refused["error"] and tenant.weights() == before
            await tenant.act("pass", 1)
            assert "metrics" in await tenant.act("step"), "and the next one begins anew"

    run(go())


def test_names_of_others_are_as_unknown_as_names_of_nobody(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path, keys=KEYS) as server:
            ann, bob = [await Tenant(server, key).begin() for key in KEYS.values()]
            await ann.act("save")
            await ann.act("snapshot")
            place, path = {"model_id": ann.model, "seq_id": 3}, f"tinker://{ann.model}/weights/s1"
            prompt = {"prompt": {"chunks": [{"tokens": [3]}]}, "sampling_params": {"max_tokens": 1}}
            tries: list[tuple[str, Any]] = [
                ("session_heartbeat", {"session_id": ann.session}),
                ("create_model", {"session_id": ann.session, "model_seq_id": 1, "base_model": "base"}),
                ("forward_backward", pass_body(ann.model, 3)),
                ("optim_step", {**place, "adam_params": {}}),
                ("save_weights", {**place, "path": "mine"}),
                ("load_weights", {"model_id": bob.model, "seq_id": 1, "path": path, "optimizer": False}),
                ("get_info", {"model_id": ann.model}),
                ("retrieve_future", {"request_id": f"{ann.model}:1"}),
                ("cancel_future", {"request_id": f"{ann.model}:1"}),
                ("weights_info", {"tinker_path": path}),
                ("asample", {**prompt, "sampling_session_id": ann.sampler, "seq_id": 0}),
                (
                    "create_sampling_session",
                    {"session_id": bob.session, "sampling_session_seq_id": 0, "model_path": path},
                ),
                (f"sessions/{ann.session}/finish", {}),
            ]
            weights = ann.weights()
            for path, body in tries:
                status, told = await server.post(path, body, bob.key)
                if path == "load_weights":  # it has its number, and fails in its turn
                    status, told = 404, {"detail": (await bob.result(told))["error"]}
                assert status == 404 and "there is no" in told["detail"], path
            for path in (f"training_runs/{ann.model}", f"samplers/{ann.sampler}", f"sessions/{ann.session}"):
                assert (await server.get(path, bob.key))[0] == 404
            assert (await server.get("checkpoints", bob.key))[1]["checkpoints"] == []
            assert len((await server.get("checkpoints", ann.key))[1]["checkpoints"]) == 1
            assert (await server.post("create_session", {}, "tml-nobody-at-all"))[0] == 401
            assert ann.weights() == weights

    run(go())


def test_a_session_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path) as server:
            tenant = await Tenant(server).begin()
            await tenant.act("snapshot")
            tenant.seq += 1
            future = await tenant.call(*tenant.body_of("pass", 1))  # of which the one before never comes
            saved = tmp_path / "saved"
            assert list(saved.glob("*/*/weights.json"))
            await server.post(f"sessions/{tenant.session}/finish", {"reason": {"type": "success"}})
            assert "has ended" in (await tenant.result(future))["error"]
            status, told = await server.post("session_heartbeat", {"session_id": tenant.session})
            assert status == 410 and "has ended" in told["detail"]
            assert not list(saved.glob("*/*/weights.json"))
            await asyncio.sleep(0.01)
            assert tenant.model not in server.engines.models

    run(go())


def test_who_waits_for_requests_that_come_is_not_late() -> None:
    queue = FairQueue()

    def put(seq: int, came: float) -> None:
        job = Job(request=str(seq), tenant="ann", kind="pass", session="", model="m", seq=seq, came=came)
        queue.put(job)

    put(5, 0.0)
    assert [(job.seq, due) for job, due in queue.overdue(1.0)] == [(5, 1)]
    put(1, time.monotonic())  # only now is the second due
    assert not list(queue.overdue(1.0))
    assert [(job.seq, due) for job, due in queue.overdue(time.monotonic() + 1)] == [(5, 2)]


def test_who_has_had_least_is_next() -> None:
    queue = FairQueue()

    def put(tenant: str, number: int, cost: int = 1) -> None:
        queue.put(Job(request=f"{tenant}{number}", tenant=tenant, kind="sample", session="", cost=cost))

    for number in range(6):
        put("ann", number, cost=10)
    taken = [queue.pop()[0].request for _ in range(3)]
    for number in range(4):
        put("bob", number, cost=5)
    taken += [queue.pop()[0].request for _ in range(7)]
    # bob begins where ann is, not 30 tokens behind her, and gets two of 5 for each of her 10
    assert taken == ["ann0", "ann1", "ann2", "bob0", "bob1", "ann3", "bob2", "bob3", "ann4", "ann5"]
    assert queue.pop() == []


@pytest.mark.parametrize("limit", [3])
def test_a_tenant_that_asks_too_much_is_sent_back_and_others_are_not(tmp_path: Path, limit: int) -> None:
    async def go() -> None:
        async with running(tmp_path, keys=KEYS, max_queued=limit) as server:
            ann, bob = [await Tenant(server, key).begin() for key in KEYS.values()]
            ann.seq += 1  # the first never comes, so all others wait
            for _ in range(limit):
                await ann.call(*ann.body_of("pass", 1))
            status, told = await server.post(*ann.body_of("pass", 1), ann.key)
            assert status == 429 and "come again later" in told["detail"]
            assert "metrics" in await bob.act("step")

    run(go())


ONE_OF_EACH = (
    ("pass", 1),
    ("step", 0),
    ("save", 0),
    ("pass", 2),
    ("load", 3),
    ("pass", 4),
    ("step", 1),
    ("forward", 5),
)


@pytest.mark.parametrize("worked", [False, True])
@pytest.mark.parametrize("call", range(2, 14))
def test_a_request_that_fails_has_changed_nothing(tmp_path: Path, call: int, worked: bool) -> None:
    """One call of the engines fails, before or behind its work: memory is what the written record says, or it is gone
    from memory; what a server that begins again has is the same."""

    async def go() -> None:
        async with running(tmp_path, error_at=(call, worked)) as server:
            tenant = await Tenant(server).begin()
            if tenant.model not in server.engines.models:
                return
            for each in ONE_OF_EACH:
                await tenant.act(*each)
            await tenant.act("forward", 6)
            found = tenant.weights()
        async with running(tmp_path) as server:
            tenant.server = server
            await tenant.act("forward", 7)
            assert tenant.weights() == found

    run(go())


def test_a_model_is_not_half_built(tmp_path: Path) -> None:
    """The second of two passes that are computed again fails: the request fails, and the next one has the whole."""

    async def go() -> None:
        async with running(tmp_path) as server:
            tenant = await Tenant(server).begin()
            await tenant.act("pass", 1)
            await tenant.act("pass", 2)
            whole = tenant.weights()
        async with running(tmp_path, error_at=(1, False)) as server:
            tenant.server = server
            assert "No space left" in (await tenant.act("forward", 3))["error"]
            assert tenant.model not in server.engines.models
            await tenant.act("forward", 4)
            assert tenant.weights() == whole

    run(go())


def test_a_dead_engine_ends_the_server(tmp_path: Path) -> None:
    """A request during which a server ended three times fails at the next start."""

    async def go() -> None:
        for start in range(4):
            async with running(tmp_path, dead=True) as server:
                if not start:
                    tenant = await Tenant(server).begin()
                    await tenant.act("snapshot")
                    future = await tenant.call(*tenant.body_of("sample", 1))
                if start < 3:
                    await asyncio.wait(server.service.tasks[:1], timeout=10)
                    assert isinstance(server.service.tasks[0].exception(), RolloutError)
                else:
                    tenant.server = server
                    assert "ended 3 times" in (await tenant.result(future))["error"]
                    assert "metrics" in await tenant.act("step")

    run(go())


def test_the_due_request_is_always_let_in(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path, max_queued=3) as server:
            tenant = await Tenant(server).begin()
            bodies = [tenant.body_of("pass", number) for number in range(4)]
            futures = [await tenant.call(*body) for body in [*bodies[1:], bodies[0]]]
            for future in futures:
                assert isinstance(await tenant.result(future), bytes)

    run(go())


def test_a_gap_in_the_numbers_ends_the_session(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path, session_timeout=1.0) as server:
            tenant = await Tenant(server).begin()
            tenant.seq += 1
            future = await tenant.call(*tenant.body_of("pass", 1))
            waiting = asyncio.ensure_future(tenant.result(future))
            while not waiting.done():
                await tenant.server.post("session_heartbeat", {"session_id": tenant.session})
                await asyncio.sleep(0.02)
            assert f"request 1 of {tenant.model} never came" in waiting.result()["error"]

    run(go())


def test_samples_cost_the_tokens_they_ask_for(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path) as server:
            tenant = await Tenant(server).begin()
            await tenant.act("snapshot")
            path, body = tenant.body_of("sample", 1)
            await tenant.result(await tenant.call(path, body | {"num_samples": 50}))
            await tenant.act("pass", 1)
            costs = {row["kind"]: row["cost"] for row in server.service.store.rows("SELECT kind, cost FROM requests")}
            assert costs["sample"] == 2 + 50 * 4
            assert 3 <= costs["forward_backward"] <= 20

    run(go())


def test_an_ended_session_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path) as server:
            tenant, store = await Tenant(server).begin(), server.service.store
            for act in ("forward", "pass", "step", "pass"):
                await tenant.act(act, 1)
            held = store.rows("SELECT kind FROM requests WHERE body IS NOT NULL ORDER BY seq")
            assert [row["kind"] for row in held] == ["forward_backward", "optim_step", "forward_backward"]
            assert list(tmp_path.glob("states/*/*"))
            await server.post(f"sessions/{tenant.session}/finish", {"reason": {"type": "success"}})
            assert not list(tmp_path.glob("states/*/*"))
            assert store.value("SELECT count(*) FROM requests WHERE body IS NOT NULL") == 0
            assert oct((tmp_path / "server.sqlite").stat().st_mode)[-3:] == "600"

    run(go())


def test_numbers_of_samplers_are_used_once(tmp_path: Path) -> None:
    async def go() -> None:
        async with running(tmp_path) as server:
            tenant = await Tenant(server).begin()
            await tenant.act("save")
            place = {"session_id": tenant.session, "sampling_session_seq_id": 9}
            await tenant.call("create_sampling_session", place | {"base_model": "base"})
            path = f"tinker://{tenant.model}/weights/s1"
            status, told = await server.post("create_sampling_session", place | {"model_path": path})
            assert status == 400 and "was used before" in told["detail"]
            body = {"model_id": tenant.model, "seq_id": 2, "sampling_session_seq_id": 9}
            future = await tenant.call("save_weights_for_sampler", body)
            told = await tenant.result(future)
            again = await tenant.call("save_weights_for_sampler", body | {"sampling_session_seq_id": 10})
            assert again == future and await tenant.result(again) == told, "a client that sends again counts on"
            status, _ = await server.post("save_weights_for_sampler", body | {"path": "named"})
            assert status == 400, "and this is another request"

    run(go())


def test_another_base_finds_its_facts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.differing({"model": "a", "seed": 1}) == []
    store.close()
    assert Store(tmp_path).differing({"model": "b", "seed": 1}) == ["model='a'"]
