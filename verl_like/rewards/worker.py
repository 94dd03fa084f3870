"""A reward worker process: loads the scorer, then scores what the pool sends until the pipe closes.

Started by `pool.py` as a fresh interpreter (never forked: the trainer has threads and CUDA), and kept free of torch.
Messages to the pool: ("ready", is_async), ("load_error", text), ("result", call id, RewardOutcome).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import time
import traceback
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from verl_like.rewards import graders, keeper
from verl_like.rewards.channel import Channel
from verl_like.rewards.loading import is_async, load_scorer, own_arguments
from verl_like.rewards.reward_call import RewardCall, RewardOutcome, ScorerSpec, is_finite_reward
from verl_like.user_code import EXTERNAL_MODULES, external_modules, import_modules, is_reference

_TRACEBACK_CHARS = 2000
_TEXT_CHARS = 500
_SHOWN_CHARS = 200
_EXTRA_CHARS = 65536  # of a text beside the score
_INT_BITS = 1000  # what has more is no float, and would break statistics


def main(descriptor: int, parent_pid: int, temporary: str) -> None:
    """Entry point of the process. `descriptor` is this end of the pool's socket pair; `temporary`, a folder of ours."""
    keeper.keep(parent_pid, descriptor, temporary)
    os.set_inheritable(descriptor, False)  # programs that a scorer starts must not keep the channel open
    connection = Channel(socket.socket(fileno=descriptor))
    spec: ScorerSpec = connection.receive()
    _limit_memory(spec)
    try:
        import_modules(external_modules(), EXTERNAL_MODULES)
        scorer = load_scorer(spec)
    except ValueError as error:
        connection.send(("load_error", str(error)))
        return
    connection.send(("ready", is_async(scorer)))
    with contextlib.suppress(EOFError, ConnectionError):  # the pool is gone
        if is_async(scorer) and not spec.batch:
            asyncio.run(_serve_concurrently(connection, scorer, spec))
        while True:
            _score_batch(connection, scorer, spec, connection.receive())


def _limit_memory(spec: ScorerSpec) -> None:
    if spec.memory_limit_mb is not None:
        import resource

        size = spec.memory_limit_mb * 1024**2
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _score_batch(
    connection: Channel, scorer: Callable[..., Any], spec: ScorerSpec, calls: list[tuple[int, RewardCall]]
) -> None:
    if spec.batch:
        outcomes = score_together(scorer, [call for _, call in calls], own_arguments(spec))
        for (call_id, _), outcome in zip(calls, outcomes, strict=True):
            connection.send(("result", call_id, outcome))
        return
    for call_id, call in calls:
        connection.send(("result", call_id, score_one(*_scorer_of(call, scorer, spec))))


def _scorer_of(
    call: RewardCall, scorer: Callable[..., Any], spec: ScorerSpec
) -> tuple[Callable[..., Any], RewardCall, dict[str, Any]]:
    """What grades this call: the built-in grader that it names, or the worker's function."""
    if call.grader is not None:
        return graders.compute_score, call, {"grader": call.grader, "options": spec.options}
    return scorer, call, own_arguments(spec)


def score_together(scorer: Callable[..., Any], calls: list[RewardCall], kwargs: dict[str, Any]) -> list[RewardOutcome]:
    """One call of verl's batch form: lists in, a list of numbers or dictionaries out."""
    start = time.perf_counter()
    try:
        values = scorer(
            data_sources=[call.data_source for call in calls],
            solution_strs=[call.solution_str for call in calls],
            ground_truths=[call.ground_truth for call in calls],
            extra_infos=[call.extra_info for call in calls],
            **kwargs,
        )
        if inspect.isawaitable(values):
            values = _run(values)
        values = list(values)
        seconds = time.perf_counter() - start
        if len(values) != len(calls):
            return [_bad_value(f"{len(values)} scores for {len(calls)} responses", seconds)] * len(calls)
        return [to_outcome(value, seconds) for value in values]
    except BaseException as error:
        return [_exception_outcome(error, start)] * len(calls)


def score_one(scorer: Callable[..., Any], call: RewardCall, kwargs: dict[str, Any]) -> RewardOutcome:
    """Run one call and turn whatever it does, short of killing the process, into an outcome."""
    start = time.perf_counter()
    try:
        value = scorer(**_arguments(call), **kwargs)
        if inspect.isawaitable(value):
            value = _run(value)
        return to_outcome(value, time.perf_counter() - start)
    except BaseException as error:
        return _exception_outcome(error, start)


async def _serve_concurrently(connection: Channel, scorer: Callable[..., Any], spec: ScorerSpec) -> None:
    """Rows as they come, all in one event loop: for scorers that wait for a service."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    gone = asyncio.Event()

    def receive() -> None:
        try:
            calls = connection.receive()
        except (EOFError, ConnectionError):
            gone.set()
            return
        for call_id, call in calls:
            task = loop.create_task(_score_async(connection, scorer, spec, call_id, call))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    loop.add_reader(connection.fileno(), receive)
    await gone.wait()
    os._exit(0)  # whatever still waits, nobody will hear of it


async def _score_async(
    connection: Channel, scorer: Callable[..., Any], spec: ScorerSpec, call_id: int, call: RewardCall
) -> None:
    start = time.perf_counter()
    limit = asyncio.timeout(spec.timeout)  # counts from when this call starts: others may block the loop before
    try:
        if call.grader is not None and not is_reference(call.grader):  # built in, and short
            outcome = score_one(*_scorer_of(call, scorer, spec))
        else:
            function, _, arguments = _scorer_of(call, scorer, spec)
            async with limit:
                value = function(**_arguments(call), **arguments)
                if inspect.isawaitable(value):  # a grader of the user's own need not be
                    value = await value
            outcome = to_outcome(value, time.perf_counter() - start)
    except TimeoutError as error:
        outcome = _exception_outcome(error, start)
        if limit.expired():  # otherwise it is a time limit of the function's own: an exception like any other
            message = f"no result within custom_reward_function.timeout={spec.timeout:g} s"
            outcome = RewardOutcome(kind="timeout", message=message, seconds=outcome.seconds)
    except BaseException as error:
        outcome = _exception_outcome(error, start)
    connection.send(("result", call_id, outcome))


def to_outcome(value: Any, seconds: float = 0.0) -> RewardOutcome:
    """Check a reward function's return value: a finite number, or a dict with one under "score"."""
    try:
        return _checked(value, seconds)
    except Exception as error:  # the value's own __str__ or __float__, lists inside themselves, ...
        why = f"{type(error).__name__}: {str(error)[:_SHOWN_CHARS]}"
        return _bad_value(f"the returned {type(value).__name__} cannot be read: {why}", seconds)


def _checked(value: Any, seconds: float) -> RewardOutcome:
    extras: dict[str, Any] = {}
    if isinstance(value, dict):
        if "score" not in value:
            return _bad_value(f'the returned dict has no "score" (keys: {sorted(map(str, value))})', seconds)
        extras = {str(key): _plain(item) for key, item in value.items() if key != "score"}
        value = value["score"]
    number = _plain(value)
    if not isinstance(number, int | float):  # bool is an int
        return _bad_value(f"score must be a number, not {_short(value)} ({type(value).__name__})", seconds)
    if not is_finite_reward(number):
        return _bad_value(f"score is {_short(number)}: it must be finite, also as a 32-bit float", seconds)
    return RewardOutcome(score=float(number), extras=extras, seconds=seconds)


def _short(value: Any) -> str:
    return repr(value)[:_SHOWN_CHARS]


def _bad_value(message: str, seconds: float) -> RewardOutcome:
    return RewardOutcome(kind="bad_value", message=message, seconds=seconds)


def _exception_outcome(error: BaseException, start: float) -> RewardOutcome:
    text = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]
    kind = "memory" if isinstance(error, MemoryError) else "exception"
    return RewardOutcome(kind=kind, message=text, seconds=time.perf_counter() - start)


def _plain(value: Any) -> Any:
    """Python's own types only, so that the trainer can read the result without the user's modules."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)[:_EXTRA_CHARS]  # an enum member may be a str
    if isinstance(value, int):
        return int(value) if value.bit_length() < _INT_BITS else f"a number of {value.bit_length()} bits"
    if isinstance(value, float | Decimal | Fraction):
        return float(value)  # numpy.float64 is a float
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if callable(getattr(value, "item", None)):  # numpy scalars, tensors of one element
        try:
            return _plain(value.item())
        except (ValueError, RuntimeError, TypeError):  # more than one element
            return str(value)[:_TEXT_CHARS]
    return str(value)[:_TEXT_CHARS]


def _arguments(call: RewardCall) -> dict[str, Any]:
    return {
        "data_source": call.data_source,
        "solution_str": call.solution_str,
        "ground_truth": call.ground_truth,
        "extra_info": call.extra_info,
    }


def _run(awaitable: Any) -> Any:
    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())
