"""The end of a collection in the event loop of the episodes."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from verl_like.episodes.answering import Collection
from verl_like.episodes.loop import Arrivals


def test_requests_that_are_lost_at_the_end_are_not_told_by_asyncio() -> None:
    """An engine dies while the others' requests are ended: its death is told once, by whoever raises it."""
    told = list[dict[str, Any]]()
    requests = {f"train-0-{sample}-0": Future[int]() for sample in range(8)}

    def abort(names: list[str]) -> None:
        for name in names:
            requests[name].set_exception(RuntimeError("the engine died"))

    async def step() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context))
        trails: Any = {0: [SimpleNamespace(requests=list(requests.items()))]}
        unused: Any = None
        parts = (unused, SimpleNamespace(abort=abort), unused, Arrivals(loop), {}, lambda: None, False, trails)
        await Collection(*parts).end([])
        gc.collect()

    asyncio.run(step())
    assert all(request.done() for request in requests.values()) and told == []
