"""A reward worker process: loads the scorer, then scores what the pool sends until the pipe closes.

Started by `pool.py` as a fresh interpreter (never forked: the trainer has threads and CUDA), and kept free of torch.
Messages to the pool: ("ready", is_async), ("load_error", text), ("result", call id, RewardOutcome).
"""

from __future__ import annotations

import inspect
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from verl_like.rewards.loading import is_async, load_scorer
from verl_like.rewards.protocol import RewardCall, RewardOutcome, ScorerSpec

_TRACEBACK_CHARS = 2000
_TEXT_CHARS = 500


def main(descriptor: int, parent_pid: int) -> None:
    """Entry point of the process. `descriptor` is this end of the pool's socket pair."""
    _die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's business: it closes the pool
    os.set_inheritable(descriptor, False)  # programs that a scorer starts must not keep the pipe open
    connection = Connection(descriptor)
    spec: ScorerSpec = connection.recv()
    try:
        scorer = load_scorer(spec)
    except ValueError as error:
        connection.send(("load_error", str(error)))
        return
    connection.send(("ready", is_async(scorer)))
    try:
        while True:
            _score_batch(connection, scorer, spec, connection.recv())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the pool is gone


def _score_batch(
    connection: Connection, scorer: Callable[..., Any], spec: ScorerSpec, calls: list[tuple[int, RewardCall]]
) -> None:
    if is_async(scorer):
        _score_concurrently(connection, scorer, spec, calls)
        return
    for call_id, call in calls:
        connection.send(("result", call_id, score_one(scorer, call, spec.kwargs)))


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


def _score_concurrently(
    connection: Connection, scorer: Callable[..., Any], spec: ScorerSpec, calls: list[tuple[int, RewardCall]]
) -> None:
    """All rows of a message at once in an event loop: for scorers that wait for a service."""
    import asyncio

    async def one(call_id: int, call: RewardCall) -> None:
        start = time.perf_counter()
        limit = asyncio.timeout(spec.timeout)  # counts from when this call starts: others may block the loop before
        try:
            async with limit:
                value = await scorer(**_arguments(call), **spec.kwargs)
            outcome = to_outcome(value, time.perf_counter() - start)
        except TimeoutError as error:
            outcome = _exception_outcome(error, start)
            if limit.expired():  # otherwise it is a time limit of the function's own: an exception like any other
                message = f"no result within custom_reward_function.timeout={spec.timeout:g} s"
                outcome = RewardOutcome(kind="timeout", message=message, seconds=outcome.seconds)
        except BaseException as error:
            outcome = _exception_outcome(error, start)
        connection.send(("result", call_id, outcome))

    async def everything() -> None:
        await asyncio.gather(*(one(call_id, call) for call_id, call in calls))

    asyncio.run(everything())


def to_outcome(value: Any, seconds: float = 0.0) -> RewardOutcome:
    """Check a reward function's return value: a finite number, or a dict with one under "score"."""
    extras: dict[str, Any] = {}
    if isinstance(value, dict):
        if "score" not in value:
            return _bad_value(f'the returned dict has no "score" (keys: {sorted(map(str, value))})', seconds)
        extras = {str(key): _plain(item) for key, item in value.items() if key != "score"}
        value = value["score"]
    value = _plain(value)
    if not isinstance(value, int | float):  # bool is an int
        return _bad_value(f"score must be a number, not {value!r} ({type(value).__name__})", seconds)
    if not math.isfinite(value):
        return _bad_value(f"score is {value}", seconds)
    return RewardOutcome(score=float(value), extras=extras, seconds=seconds)


def _bad_value(message: str, seconds: float) -> RewardOutcome:
    return RewardOutcome(kind="bad_value", message=message, seconds=seconds)


def _exception_outcome(error: BaseException, start: float) -> RewardOutcome:
    text = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]
    return RewardOutcome(kind="exception", message=text, seconds=time.perf_counter() - start)


def _plain(value: Any) -> Any:
    """Python's own types only, so that the trainer can read the result without the user's modules."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enum member may be a str
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)  # numpy.float64 is a float
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
    chosen = {} if call.grader is None else {"grader": call.grader}
    return chosen | {
        "data_source": call.data_source,
        "solution_str": call.solution_str,
        "ground_truth": call.ground_truth,
        "extra_info": call.extra_info,
    }


def _run(awaitable: Any) -> Any:
    import asyncio

    async def wait() -> Any:
        return await awaitable

    return asyncio.run(wait())


def _die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the trainer dies, even while a scorer hangs in C code."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the call above
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(parent_pid,), daemon=True).start()


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    os._exit(1)
