"""An event loop in a thread of its own: where episodes run, beside the driver's tensor work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

_BEAT_S = 0.05
_JOIN_S = 10.0


class EpisodeLoop:
    """Runs coroutines for other threads, and measures how late it is."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.arrivals = Arrivals(self._loop)
        self._lag_s = 0.0
        self._running: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start it; the future gets its result or error. Cancelling the future cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Its result, for coroutines that do not wait long. RuntimeError, with where it is, when it is blocked."""
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # its own
                raise
            future.cancel()
            frame = sys._current_frames().get(self._thread.ident or 0)
            at = "".join(traceback.format_stack(frame)[-8:]) if frame is not None else "(it has ended)"
            raise RuntimeError(
                f"a tool, agent loop or grader has blocked the event loop of the episodes for {timeout_s:g} s, at\n{at}"
            ) from None

    def take_lag(self) -> float:
        """[s] The longest that the loop was late since the last call: something in it blocked for so long."""
        lag, self._lag_s = self._lag_s, 0.0
        return lag

    def close(self) -> None:
        """Stop; what still runs is cancelled. Safe to call twice."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._beat(time.monotonic())
        error: BaseException | None = None
        try:
            self._loop.run_forever()
        except BaseException as raised:  # SystemExit in a callback, for instance: asyncio lets it through
            logger.exception("the event loop of the episodes has ended")
            error = raised
        try:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            for future in list(self._running):  # whoever waits for one must hear of it
                if not future.done():
                    future.set_exception(RuntimeError(f"the event loop of the episodes has ended: {error!r}"))
            self._loop.close()

    def _beat(self, due: float) -> None:
        now = time.monotonic()
        self._lag_s = max(self._lag_s, now - due)
        self._loop.call_later(_BEAT_S, self._beat, now + _BEAT_S)


class Arrivals:
    """Brings futures of other threads into an event loop, which is woken once for all that are done together:
    `asyncio.wrap_future` wakes it for each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._done: deque[tuple[asyncio.Future[Any], Future[Any]]] = deque()
        self._waking = False

    def wait_for(self, future: Future[T]) -> asyncio.Future[T]:
        """Return a future of this loop with the same result or error. Cancelling it leaves `future` alone."""
        here: asyncio.Future[T] = self._loop.create_future()
        future.add_done_callback(partial(self._put, here))
        return here

    def _put(self, here: asyncio.Future[T], future: Future[T]) -> None:
        self._done.append((here, future))
        if not self._waking:  # what is appended before `_take` looks needs no second call
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._waking = False
        while self._done:
            here, future = self._done.popleft()
            if here.done():  # cancelled
                continue
            if (error := future.exception()) is not None:
                here.set_exception(error)
            else:
                here.set_result(future.result())
