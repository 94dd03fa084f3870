"""A race: more is begun than is needed, and what ends first is kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")
GRACE_S = 10.0  # for what is no longer wanted


async def all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results; the first error ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end(tasks)


async def first_of(
    racing: Sequence[Coroutine[Any, Any, T]],
    count: int,
    is_good: Callable[[T], bool],
    besides: Sequence[Coroutine[Any, Any, T]] = (),
) -> tuple[dict[int, T], list[T]]:
    """The first `count` good results, by their places; where there are fewer, others in their stead. All others are
    ended at once. besides: runs along, and is waited for. The first error ends everything."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in racing]
    others = [asyncio.ensure_future(coroutine) for coroutine in besides]
    ended: list[asyncio.Task[T]] = []
    running = {*tasks, *others}
    try:
        while True:
            good = [task for task in ended if is_good(task.result())][:count]
            if len(good) == count or len(ended) == len(tasks):
                break
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in others:
                if task in done:
                    task.result()  # its error
            ended += [task for task in tasks if task in done]
        kept = [*good, *(task for task in ended if task not in good)][:count]
        await end([task for task in tasks if task not in kept])
        return {place: task.result() for place, task in enumerate(tasks) if task in kept}, await asyncio.gather(*others)
    finally:
        await end([*tasks, *others])


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel those that have not ended, wait for them, and say what they did instead of ending."""
    tasks = list(tasks)
    if left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=GRACE_S)
    for task in tasks:
        if not task.done():
            logger.error("an episode that was no longer wanted goes on: %r", task.get_coro())
        elif not task.cancelled() and isinstance(error := task.exception(), Exception) and task in left:
            logger.warning("an episode that was no longer wanted failed", exc_info=error)
