"""Ends of a link: the driver's (`SocketLink`), and that of the replica in another process (`LinkServer`).

    driver <──events, answers── thread that batches what ended <──futures── engine
      └─────orders, questions──> reader thread ──submit, abort───────────────^
                                       └─"pause"──> `serve`, in the worker's main thread ──open, pause──^

The messages, in the order they are said: ("orders", add, abort), ("snapshot", number), ("pause", number) from the
driver; ("events", Events, refusals), ("snapshot", number, found), ("paused", number) to it.

At the driver's end two threads for each link: one reads what the replica says, the other acts on it. Futures are
resolved in the second, so their callbacks may send and ask, while the first goes on reading.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from functools import partial
from multiprocessing import AuthenticationError
from queue import SimpleQueue
from typing import Any

from verl_like.heartbeat import DRIVER, span
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.client import Events, LocalLink
from verl_like.rollout.rollout_engine import GenerationRequest, RolloutError, Sampled
from verl_like.rollout.wire import Socket, Wire
from verl_like.rollout.wire_errors import heard, told

logger = logging.getLogger(__name__)

_JOIN_S = 10.0


class SocketLink:
    """Link to the LinkServer at `address`. Raises RolloutError, with the name, when it cannot be reached.

    timeout_s: seconds that `snapshot` waits for an answer.
    """

    def __init__(self, name: str, address: tuple[str, int], authkey: bytes, *, timeout_s: float = 60.0) -> None:
        self.name = name
        self.num_orders = 0  # messages that `send` has sent: see LinkServer.serve
        self._where = f"{name} ({address[0]}:{address[1]})"
        self._timeout_s = timeout_s
        try:
            self._wire = Wire.to(address, authkey)
        except (OSError, EOFError, AuthenticationError) as error:
            raise RolloutError(f"{self._where} cannot be reached: {type(error).__name__}: {error}") from error
        self._changed = threading.Lock()  # guards the next three
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._lost = ""  # why nothing comes any more
        self._heard: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._on_events: Callable[[Events], None] = lambda events: None
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._resolver = threading.Thread(target=self._act, name=f"link-{name}", daemon=True)

    def start(self, on_events: Callable[[Events], None]) -> None:
        self._on_events = on_events
        self._reader.start()
        self._resolver.start()

    def send(self, add: Sequence[GenerationRequest], abort: Sequence[str]) -> None:
        self.num_orders += 1
        self._say(("orders", tuple(add), tuple(abort)))

    def pause(self) -> Future[None]:
        """Tell the replica that is served (LinkServer.serve) to pause, after the orders sent before.

        The future is done when the replica has paused, and when all that ended there was handed over; it raises
        RolloutError when the connection is lost.
        """
        return self._ask("pause")

    def snapshot(self) -> dict[str, Sampled]:
        try:
            return self._ask("snapshot").result(self._timeout_s)
        except NoAnswer:
            logger.warning("%s did not tell within %g s what it has sampled", self._where, self._timeout_s)
            return {}
        except RolloutError:
            return {}

    def close(self) -> None:
        self._on_events = lambda events: None
        self._wire.cut()
        if self._reader.ident is None:  # never started: nobody else closes it
            self._wire.close()
        for thread in (self._reader, self._resolver):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _ask(self, what: str) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._changed:
            number = next(self._numbers)
            if self._lost:
                answer.set_exception(RolloutError(self._lost))
            else:
                self._answers[number] = answer
        self._say((what, number))
        return answer

    def _say(self, message: tuple[Any, ...]) -> None:
        try:
            self._wire.send(message)
        except OSError:
            self._wire.cut()  # and the reader says so

    def _read(self) -> None:
        try:
            while True:
                match self._wire.receive():
                    case ("events", events, refusals):
                        known = [(name, heard(error)) for name, error in refusals]
                        told = dataclasses.replace(events, refusals=known)
                        self._heard.put(lambda told=told: self._on_events(told))
                    case ("snapshot", number, found):  # now: who asks may be a callback
                        self._answer(number, found)
                    case ("paused", number):  # in its order: the events before it count
                        self._heard.put(lambda number=number: self._answer(number, None))
                    case message:
                        raise ValueError(f"not an event: {message!r}")
        except (EOFError, OSError):
            why = f"the connection to {self._where} is gone: its process has ended, or the network between"
        except Exception as error:
            why = f"what {self._where} says cannot be read: {error!r}"
        self._wire.close()
        with self._changed:
            self._lost, lost = why, list(self._answers.values())
            self._answers = {}
        self._heard.put(lambda: self._on_events(Events(death=why)))
        for answer in lost:
            answer.set_exception(RolloutError(why))
        self._heard.put(None)

    def _answer(self, number: int, found: Any) -> None:
        with self._changed:
            answer = self._answers.pop(number, None)
        if answer is not None:
            answer.set_result(found)

    def _act(self) -> None:
        while (action := self._heard.get()) is not None:
            try:
                action()
            except Exception:  # a fault of ours; the replica is given up, so that nobody waits for what it told
                logger.exception("what %s told could not be acted on", self._where)
                self._wire.cut()


class LinkServer:
    """Server of `engine`, on its replica's first rank, for the one driver that connects to `address` with `authkey`."""

    def __init__(self, engine: RolloutEngine, host: str, *, progress_s: float | None = None) -> None:
        """Listen on `host`. progress_s: seconds between two reports of what is sampled so far; None: never."""
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
        """Keep the engine open until the driver says pause.

        The engine is opened when the link's first `num_orders` order messages, counted from its beginning, are in its
        queue: the requests that they bring begin with the first step.

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
