"""A worker process: makes the service, then answers what the pool sends until the channel closes.

Started by `pool.py` as a fresh interpreter (never forked: the trainer has threads and CUDA), and kept free of torch.
Messages to the pool: ("ready", is_async), ("load_error", text), ("result", call id, Outcome).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import os
import socket
import time
import traceback
from typing import Any

from verl_like.heartbeat import show_stacks
from verl_like.services import keeper
from verl_like.services.channel import Channel
from verl_like.services.service import Outcome, Result, Service, ServiceSpec
from verl_like.user_code import EXTERNAL_MODULES, external_modules, import_modules, own_lines

_TRACEBACK_CHARS = 2000


def main(descriptor: int, parent_pid: int, temporary: str) -> None:
    """Entry point of the process. `descriptor` is this end of the pool's socket pair; `temporary`, a folder of ours."""
    keeper.keep(parent_pid, descriptor, temporary)
    show_stacks()
    os.set_inheritable(descriptor, False)  # programs that a service starts must not keep the channel open
    connection = Channel(socket.socket(fileno=descriptor))
    spec: ServiceSpec = connection.receive()
    _limit_memory(spec)
    try:
        import_modules(external_modules(), EXTERNAL_MODULES)
        service = spec.make()
    except ValueError as error:
        with contextlib.suppress(OSError):  # another worker has told it, and the pool is gone
            connection.send(("load_error", str(error)))
        return
    connection.send(("ready", service.is_async))
    with contextlib.suppress(EOFError, ConnectionError):  # the pool is gone
        if service.is_async and not spec.batch:
            asyncio.run(_serve_concurrently(connection, service, spec))
        while True:
            _answer(connection, service, spec, connection.receive())


def _limit_memory(spec: ServiceSpec) -> None:
    if spec.memory_limit_mb is not None:
        import resource

        size = spec.memory_limit_mb * 1024**2
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _answer(connection: Channel, service: Service, spec: ServiceSpec, calls: list[tuple[int, Any]]) -> None:
    for part in [calls] if spec.batch else [[call] for call in calls]:
        outcomes = _call(service, spec, [payload for _, payload in part])
        for (number, _), outcome in zip(part, outcomes, strict=True):
            _reply(connection, spec, number, outcome)


def _call(service: Service, spec: ServiceSpec, payloads: list[Any]) -> list[Outcome]:
    """Run one call, of several payloads where `batch` says so: it fails, if it does, as a whole.

    Whatever it does, short of killing the process, becomes an outcome.
    """
    start = time.perf_counter()
    try:
        value = service.call(payloads if spec.batch else payloads[0])
        if inspect.isawaitable(value):
            value = _run(value)
        values = list(value) if spec.batch else [value]
        if len(values) != len(payloads):
            raise ValueError(f"{len(values)} results for {len(payloads)} calls")
        return [_outcome(value, start) for value in values]
    except BaseException as error:
        return [_failure(spec, error, start)] * len(payloads)


async def _serve_concurrently(connection: Channel, service: Service, spec: ServiceSpec) -> None:
    """Serve calls as they come, all in one event loop: for services that wait for something elsewhere."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    gone = asyncio.Event()

    def receive() -> None:
        try:
            calls = connection.receive()
        except (EOFError, ConnectionError):
            gone.set()
            return
        except Exception:  # a payload that cannot be read here: asyncio would only log it, and its calls never end
            traceback.print_exc()
            os._exit(1)
        for number, payload in calls:
            task = loop.create_task(_answer_async(connection, service, spec, number, payload))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    loop.add_reader(connection.fileno(), receive)
    await gone.wait()
    os._exit(0)  # whatever still waits, nobody will hear of it


async def _answer_async(connection: Channel, service: Service, spec: ServiceSpec, number: int, payload: Any) -> None:
    start = time.perf_counter()
    limit = asyncio.timeout(spec.timeout)  # counts from when this call starts: others may block the loop before
    try:
        async with limit:
            value = service.call(payload)
            if inspect.isawaitable(value):  # a short call need not be
                value = await value
        outcome = _outcome(value, start)
    except TimeoutError as error:
        outcome = _failure(spec, error, start)
        if limit.expired():  # otherwise it is a time limit of the service's own: an exception like any other
            message = f"no result within {spec.section}timeout={spec.timeout:g} s"
            outcome = spec.outcome(kind="timeout", message=message, seconds=outcome.seconds)
    except BaseException as error:
        outcome = _failure(spec, error, start)
    _reply(connection, spec, number, outcome)


def _reply(connection: Channel, spec: ServiceSpec, number: int, outcome: Outcome) -> None:
    try:
        connection.send(("result", number, outcome))
    except OSError:  # the pool is gone
        raise
    except Exception as error:  # nothing was sent yet
        message = f"the result cannot be sent to the trainer: {error!r:.500}"
        connection.send(("result", number, spec.outcome(kind="exception", message=message, seconds=outcome.seconds)))


def _outcome(value: Any, start: float) -> Outcome:
    seconds = time.perf_counter() - start
    if isinstance(value, Outcome):
        return dataclasses.replace(value, seconds=seconds)
    return Result(value=value, seconds=seconds)


def _failure(spec: ServiceSpec, error: BaseException, start: float) -> Outcome:
    text = own_lines(error)[-_TRACEBACK_CHARS:]
    kind = "memory" if isinstance(error, MemoryError) else "exception"
    return spec.outcome(kind=kind, message=text, seconds=time.perf_counter() - start)


def _run(awaitable: Any) -> Any:
    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())
