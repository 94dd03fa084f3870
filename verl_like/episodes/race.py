"""A race: more is begun than is needed, and what ends first is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
GRACE_S = 10.0  # for what is no longer wanted


async def all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results; the first error ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def first_of(
    racing: Sequence[Coroutine[Any, Any, T]],
    count: int,
    is_good: Callable[[T], bool],
    besides: Sequence[Coroutine[Any, Any, T]] = (),
) -> tuple[dict[int, T], list[T]]:
    """The first `count` good results, by their places; where there are fewer, others in their stead. All others are
    ended. besides: runs along, and is waited for. The first error ends everything."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in racing]
    others = [asyncio.ensure_future(coroutine) for coroutine in besides]
    order: list[asyncio.Task[T]] = []
    for task in tasks:
        task.add_done_callback(order.append)
    try:
        while True:
            good = [task for task in order if is_good(task.result())][:count]
            if len(good) == count or len(order) == len(tasks):
                break
            await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
        kept = [*good, *(task for task in order if task not in good)][:count]
        return {place: task.result() for place, task in enumerate(tasks) if task in kept}, await asyncio.gather(*others)
    finally:
        await _end([*tasks, *others])
        for task in (*tasks, *others):
            if task.done() and not task.cancelled():
                task.exception()  # asyncio would complain that nobody has asked


def cancel(tasks: Iterable[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    """Tell those that have not ended to end; which these are."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    return left


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    if left := cancel(tasks):
        await asyncio.wait(left, timeout=GRACE_S)
