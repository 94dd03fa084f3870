"""Service of a reward worker: calls the user's function or a built-in grader, and reads the score from its value."""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from multiprocessing import popen_fork, popen_forkserver
from typing import Any

from verl_like.rewards import graders
from verl_like.rewards.loading import SERVED, is_async, load_scorer, own_arguments, takes_address
from verl_like.rewards.reward_call import RewardOutcome, ScorerSpec, is_finite_reward

_TEXT_CHARS = 500
_SHOWN_CHARS = 200
_EXTRA_CHARS = 65536  # of a text beside the score
_NO_LISTS = (dict, set, frozenset, str, bytes, bytearray)  # their keys, letters and bytes are no scores
_INT_BITS = 1000  # what has more is no float, and would break statistics


class Grader:
    """The service of reward workers. Making one raises a ValueError that names the key to change."""

    def __init__(self, spec: ScorerSpec) -> None:
        self._spec = spec
        self._scorer = load_scorer(spec)
        self._arguments = own_arguments(spec)
        self._wants_address = takes_address(spec, self._scorer)
        self.is_async = is_async(self._scorer)
        watch_children()

    def call(self, payload: Any) -> Any:
        """The RewardOutcome of a RewardCall; of a list of them, in verl's batch form, the list. Or an awaitable."""
        if self._spec.batch:
            values = self._scorer(
                data_sources=[call.data_source for call in payload],
                solution_strs=[call.solution_str for call in payload],
                ground_truths=[call.ground_truth for call in payload],
                extra_infos=[call.extra_info for call in payload],
                **self._with_address(payload[0].server),
            )
            return _read(values, lambda values: _outcomes(values, len(payload)))
        scorer, arguments = self._scorer, self._with_address(payload.server)
        if payload.grader is not None:
            scorer, arguments = graders.compute_score, {"grader": payload.grader, "options": self._spec.options}
        value = scorer(
            data_source=payload.data_source,
            solution_str=payload.solution_str,
            ground_truth=payload.ground_truth,
            extra_info=payload.extra_info,
            **arguments,
        )
        return _read(value, to_outcome)

    def _with_address(self, server: str) -> dict[str, Any]:
        return {**self._arguments, SERVED[0]: server} if self._wants_address else self._arguments


def _read(value: Any, reader: Callable[[Any], Any]) -> Any:
    """Apply `reader` to a value; for an awaitable value, return an awaitable of the result."""
    return _read_later(value, reader) if inspect.isawaitable(value) else reader(value)


async def _read_later(value: Awaitable[Any], reader: Callable[[Any], Any]) -> Any:
    return reader(await value)


def _outcomes(values: Any, count: int) -> list[RewardOutcome]:
    if not isinstance(values, Iterable) or isinstance(values, _NO_LISTS):
        found = f"{_short(values)} ({type(values).__name__})"
        return [_bad_value(f"a batch function returns a list with the score of each response, not {found}")] * count
    values = list(values)
    if len(values) != count:
        return [_bad_value(f"{len(values)} scores for {count} responses")] * count
    return [to_outcome(value) for value in values]


def to_outcome(value: Any) -> RewardOutcome:
    """Check a reward function's return value: a finite number, a dict with one under "score", or a tuple that begins
    with either (verl's graders of PRIME return such)."""
    try:
        return _checked(value)
    except Exception as error:  # the value's own __str__ or __float__, lists inside themselves, ...
        why = f"{type(error).__name__}: {str(error)[:_SHOWN_CHARS]}"
        return _bad_value(f"the returned {type(value).__name__} cannot be read: {why}")


def _checked(value: Any) -> RewardOutcome:
    extras: dict[str, Any] = {}
    if isinstance(value, tuple) and value:
        value = value[0]
    if isinstance(value, dict):
        if "score" not in value:
            return _bad_value(f'the returned dict has no "score" (keys: {sorted(map(str, value))})')
        extras = {str(key)[:_SHOWN_CHARS]: _plain(item) for key, item in value.items() if key != "score"}
        value = value["score"]
    number = _plain(value)
    if not isinstance(number, int | float):  # bool is an int
        return _bad_value(f"score must be a number, not {_short(value)} ({type(value).__name__})")
    if not is_finite_reward(number):
        return _bad_value(f"score is {_short(number)}: it must be finite, also as a 32-bit float")
    return RewardOutcome(score=float(number), extras=extras, child_died=last_death())


def _short(value: Any) -> str:
    return repr(value)[:_SHOWN_CHARS]


def _bad_value(message: str) -> RewardOutcome:
    return RewardOutcome(kind="bad_value", message=message)


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
    if type(value).__module__.startswith("numpy.ma"):
        return _plain(value.tolist())  # None where it is masked: `item` gives what lies beneath, or 0
    if getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M"):
        return str(value)  # a time is no number, however it is stored
    if callable(getattr(value, "item", None)):  # numpy scalars, tensors of one element
        with contextlib.suppress(ValueError, RuntimeError, TypeError):  # more than one element
            return _plain(value.item())
    return str(value)[:_TEXT_CHARS]


@functools.cache
def watch_children() -> list[str]:
    """Record how children of this process die, and return the list, which grows.

    Only children of multiprocessing count, which Python's own pools start too: programs that a function runs may fail
    as they like. SIGTERM is left out, as multiprocessing ends its children with it.
    """
    deaths: list[str] = []

    def noting(self: Any, flag: int = os.WNOHANG, *, poll: Callable[..., int | None]) -> int | None:
        known, status = self.returncode, poll(self, flag)
        if known is None and status not in (None, 0, -signal.SIGTERM):
            deaths.append(f"exited with status {status}" if status > 0 else f"was killed by signal {-status}")
        return status

    for kind in (popen_fork.Popen, popen_forkserver.Popen):  # spawned ones use the first's
        kind.poll = functools.partialmethod(noting, poll=kind.poll)  # pyright: ignore
    return deaths


def last_death() -> str:
    """Return the last death of a child, also of one that nobody has waited for yet; "" without any."""
    multiprocessing.active_children()  # looks at each
    return next(reversed(watch_children()), "")
