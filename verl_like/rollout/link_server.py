"""The replica's end of a link: orders of one driver go to the engine, what happens there goes back.

    driver <──events, answers── thread that batches what ended <──futures── engine
      └─────orders, questions──> reader thread ──submit, abort───────────────^
                                       └─"pause"──> `serve`, in the worker's main thread ──open, pause──^

The messages, in the order they are said: ("orders", add, abort), ("snapshot", number), ("pause", number) from the
driver; ("events", Events, refusals), ("snapshot", number, found), ("paused", number) to it. See link.py.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from verl_like.progress import DRIVER, span
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.client import Events, LocalLink
from verl_like.rollout.rollout_engine import RolloutError
from verl_like.rollout.travel import told
from verl_like.rollout.wire import Socket, Wire

logger = logging.getLogger(__name__)

_JOIN_S = 10.0


class LinkServer:
    """Serves `engine`, on its replica's first rank, to the one driver that connects to `address` with `authkey`."""

    def __init__(self, engine: RolloutEngine, host: str, *, progress_s: float | None = None) -> None:
        """host: the address to listen on. progress_s: how often it tells what runs has sampled (None: never)."""
        self._engine = engine
        self._socket = Socket(host)
        self.address, self.authkey = self._socket.address, self._socket.authkey
        self._local = LocalLink("driver", engine, progress_s=progress_s)
        self._changed = threading.Condition()  # guards everything below
        self._wire: Wire | None = None
        self._num_orders = 0
        self._pauses: deque[int] = deque()  # asked for, not yet made
        self._error = ""  # why nothing is served any more
        self._closed = False
        self._reader = threading.Thread(target=self._run, name="link-orders", daemon=True)
        self._reader.start()

    def serve(self, num_orders: int) -> None:
        """Keep the engine open until the driver says pause. It is opened when the link's first `num_orders` order
        messages, counted from its beginning, are in the engine's queue: what they bring begins with the first step.

        Raises RolloutError when the engine or the connection is lost, and what `RolloutEngine.open` raises.
        """
        self._wait(lambda: self._num_orders >= num_orders)
        with self._engine.opened(), span("serving", whom=DRIVER):
            self._wait(lambda: bool(self._pauses))
        number = self._pauses.popleft()
        self._local.afterwards(partial(self._say, ("paused", number)))  # when the driver was told all that ended

    def close(self) -> None:
        """Cut the connection; the engine is left alone."""
        with self._changed:
            self._closed = True
            wire = self._wire
        self._socket.close()
        if wire is not None:
            wire.cut()
        self._reader.join(_JOIN_S)

    def _wait(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: reached() or self._error)
            if not reached():
                raise RolloutError(self._error)

    def _run(self) -> None:
        try:
            wire = self._socket.accept()
            with self._changed:
                self._wire = wire
                if self._closed:
                    wire.cut()
            self._local.start(self._tell)
            while True:
                self._obey(wire.receive())
        except (EOFError, OSError) as error:
            self._fail(f"the connection to the driver is gone ({type(error).__name__})")
        except Exception as error:
            logger.exception("an order of the driver could not be carried out")
            self._fail(f"an order of the driver could not be carried out: {type(error).__name__}: {error}")
        finally:
            if self._wire is not None:
                self._wire.cut()  # first: the other thread may be waiting for the driver to read
                self._local.close()
                self._wire.close()

    def _obey(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("orders", add, abort):
                self._local.send(add, abort)
                with self._changed:
                    self._num_orders += 1
                    self._changed.notify_all()
            case ("snapshot", number):
                self._say(("snapshot", number, self._local.snapshot()))
            case ("pause", number):
                with self._changed:
                    self._pauses.append(number)
                    self._changed.notify_all()
            case _:
                raise ValueError(f"not an order: {message!r}")

    def _tell(self, events: Events) -> None:
        refusals = [(name, told(error)) for name, error in events.refusals]
        self._say(("events", dataclasses.replace(events, refusals=()), refusals))
        if events.death is not None:
            self._fail(events.death)

    def _say(self, message: tuple[Any, ...]) -> None:
        assert self._wire is not None
        try:
            self._wire.send(message)
        except OSError:
            self._wire.cut()  # and the reader says so

    def _fail(self, why: str) -> None:
        with self._changed:
            self._error = self._error or why
            self._changed.notify_all()
