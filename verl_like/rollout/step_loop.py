"""Thread that drives an engine: requests come and go between steps, each future is resolved as its response ends.

One thread calls the engine's `step`. A loop is OPEN, PAUSING or PAUSED:

    PAUSED --open()--> OPEN --pause()--> PAUSING --no step runs any more--> PAUSED

Everything else that touches the engine (weights, scoring, sleep) does so inside `exclusive()`, which needs a paused
loop, or one with nothing to do. With tensor parallelism every rank of the replica runs such a thread and makes the same
steps: the first rank broadcasts, before each, what changes with it (orders.py); the others carry it out. A pause is an
order too: the other ranks leave the broadcast with it, so nothing waits in the network while the trainer computes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Protocol

import torch

from verl_like.heartbeat import span
from verl_like.rollout.orders import Lockstep, Orders
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError, Sampled

logger = logging.getLogger(__name__)

_KEEPALIVE_S = 10.0  # an idle open replica is sent an empty order this often: its ranks wait with a time limit
_JOIN_S = 60.0
_PARTING_S = 30.0  # a rank that closes waits so long for its first rank's word; then it leaves with the next order
_SHUT_DOWN = "the rollout engine was shut down"


class Phase(Enum):
    """State of a loop: it steps, ends its last step, or rests."""

    OPEN = "open"
    PAUSING = "pausing"
    PAUSED = "paused"


class SteppedEngine(Protocol):
    """Engine that the loop drives. All calls come from one thread at a time."""

    @property
    def weight_version(self) -> int | None: ...

    def add(self, request: GenerationRequest) -> None:
        """Take up a request with the next steps. Raises ValueError to refuse it."""
        ...

    def step(self) -> list[Completion]:
        """Run one forward pass; return the responses that ended with it."""
        ...

    def has_unfinished(self) -> bool: ...

    def drop(self, request_ids: Sequence[str]) -> list[Completion]:
        """End those of these requests that are under way; return their tokens, with finish reason "abort"."""
        ...

    def progress(self) -> dict[str, Sampled]:
        """Tokens sampled so far of the requests under way."""
        ...


def submit_each(
    submit: Callable[[GenerationRequest], Future[Completion]], requests: Sequence[GenerationRequest]
) -> list[Future[Completion]]:
    """Submit each request and return its future; an error that `submit` raises is set on it."""
    futures: list[Future[Completion]] = []
    for request in requests:
        try:
            futures.append(submit(request))
        except Exception as error:
            futures.append(Future())
            futures[-1].set_exception(error)
    return futures


class StepLoop:
    """Owner of the step thread, the queue in front of it and the futures behind it.

    The constructor is called by the thread that will load weights, when the engine has started: steps run on its CUDA
    stream. Callbacks of the futures run in the step thread: they may submit, abort and look, but not open, pause or
    close.
    """

    def __init__(self, engine: SteppedEngine, *, device: torch.device, lockstep: Lockstep | None = None) -> None:
        self._engine = engine
        self._device = device
        # The current stream belongs to the thread too. On one of its own, steps could overtake the loading of weights,
        # which the caller's thread does, and vLLM would read sampled tokens before they are there.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._lockstep = lockstep
        self._engine_lock = threading.Lock()  # taken before `_changed` where both are needed
        self._changed = threading.Condition()  # guards everything below
        self._phase = Phase.PAUSED
        self._num_pauses = 0
        self._guests_came = self._guests_gone = 0  # callers that take the engine's lock beside the step thread
        self._waiting: dict[str, GenerationRequest] = {}  # submitted, not yet in orders; insertion order
        self._ordered: dict[str, GenerationRequest] = {}  # in orders, not yet added
        self._futures: dict[str, Future[Completion]] = {}
        self._aborted: dict[str, None] = {}  # to be dropped before the next step
        self._closing, self._leave_at = False, math.inf
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollout-steps", daemon=True)
        self._thread.start()

    @property
    def leads(self) -> bool:
        """True for the rank of its replica that is given requests."""
        return self._lockstep is None or self._lockstep.is_leader

    @property
    def phase(self) -> Phase:
        return self._phase

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """Queue a request. Raises RolloutError when the loop has died or is closed."""
        if not self.leads:
            raise RolloutError(f"request {request.request_id}: only the first rank of a replica is given requests")
        with self._changed:
            self._raise_if_dead()
            if request.request_id in self._futures:
                raise ValueError(f"request id {request.request_id!r} is already in use")
            future: Future[Completion] = Future()
            future.set_running_or_notify_cancel()  # `abort` ends a request: a cancelled future would hide its tokens
            self._futures[request.request_id] = future
            self._waiting[request.request_id] = request
            self._changed.notify_all()
        return future

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """Queue requests so that all of them are added before the same step; see `RolloutEngine.submit_all`."""
        with self.between_orders():
            return submit_each(self.submit, requests)

    def between_orders(self) -> AbstractContextManager[object]:
        """Hold the orders back: all requests submitted inside go into the same ones."""
        return self._changed

    def abort(self, request_ids: Sequence[str] | None) -> None:
        """End these requests, or all: at once where they wait, before the next step where they run."""
        with self._changed:
            ids = list(self._futures) if request_ids is None else [i for i in request_ids if i in self._futures]
            waiting = [self._waiting.pop(i) for i in ids if i in self._waiting]
            ended = [(self._futures.pop(r.request_id), r) for r in waiting]
            self._aborted |= dict.fromkeys(i for i in ids if i in self._futures)
            self._changed.notify_all()
        for future, request in ended:
            ended_here = Completion(request_id=request.request_id, sampled=request.resume, finish_reason="abort")
            future.set_result(ended_here)

    def snapshot(self) -> dict[str, Sampled]:
        """Tokens sampled so far of all pending requests."""
        with self._as_guest():
            running = self._engine.progress() if self._error is None else {}
            with self._changed:
                waiting = {i: request.resume for i, request in (self._ordered | self._waiting).items()}
                return {i: found for i, found in (waiting | running).items() if i in self._futures}

    def open(self) -> None:
        """Make steps from now on; waits for a pause that is under way."""
        with self._changed:
            self._changed.wait_for(lambda: self._phase is not Phase.PAUSING or self._error is not None)
            self._raise_if_dead()
            self._phase = Phase.OPEN
            self._changed.notify_all()

    def pause(self) -> None:
        """Park the loop between two steps, and return then. A replica's other ranks park when its first one says so."""
        with self._changed:
            if self._phase is Phase.OPEN and self.leads:
                self._phase = Phase.PAUSING
                self._changed.notify_all()
            before = self._num_pauses  # somebody may open it again before this thread looks
            self._changed.wait_for(
                lambda: self._phase is Phase.PAUSED or self._num_pauses > before or self._error is not None
            )
            self._raise_if_dead()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Give the engine to the caller alone: no step runs, though requests may be under way in a paused loop."""
        with self._as_guest():
            with self._changed:
                self._raise_if_dead()
                idle = self._lockstep is None and not self._futures
                if self._phase is not Phase.PAUSED and not idle:
                    raise RolloutError(
                        f"the engine is {self._phase.value}, {len(self._futures)} requests are still being generated: "
                        "pause the engine first"
                    )
            yield

    @contextmanager
    def _as_guest(self) -> Iterator[None]:
        """Hold the engine's lock, between two steps.

        The loop lets guests go first: it would take the lock again at once.
        """
        with self._changed:
            self._guests_came += 1
        try:
            with self._engine_lock:
                yield
        finally:
            with self._changed:
                self._guests_gone += 1
                self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread. Requests still pending fail with RolloutError."""
        with self._changed:
            self._closing = True
            self._leave_at = time.monotonic() + _PARTING_S
            self._changed.notify_all()
        self._thread.join(timeout=_JOIN_S)
        self._fail(RolloutError(_SHUT_DOWN))

    # Everything below runs in the loop's thread.

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)  # the current device belongs to the thread
            torch.cuda.set_stream(self._stream)
        try:
            while self._advance():
                pass
            self._fail(RolloutError(_SHUT_DOWN))  # whoever waits for this rank's pause, also where the first one closed
        except Exception as error:
            logger.exception("the rollout engine's step failed")
            self._fail(error)
            traceback.clear_frames(error.__traceback__)  # they hold what `leave` lets go of
            self._leave()

    def _advance(self) -> bool:
        """Wait until there is something to do, and do it; False at the end."""
        if not self._wait():
            self._leave()
            return False
        orders = self._collect() if self.leads else Orders()
        if self._lockstep is not None:
            with span("orders", whom="" if self.leads else "the replica's first rank"):
                orders = self._lockstep.agree(orders if self.leads else None)
        if orders.stop:
            return False
        with self._engine_lock, span("engine step"):
            done, refused = self._carry_out(orders)
        if orders.pause and self._lockstep is not None:
            self._lockstep.meet()  # a pause is one only when the slowest rank has ended its last step
        if self.leads:
            self._resolve(done, refused)
        if orders.pause:  # when everything that ended before it is known
            with self._changed:
                self._phase = Phase.PAUSED
                self._num_pauses += 1
                self._changed.notify_all()
        return True

    def _leave(self) -> None:
        """Leave the lockstep at an end that was not ordered: ranks that do not know of it must not wait."""
        if self._lockstep is not None:
            self._lockstep.leave()

    def _resolve(self, done: list[Completion], refused: dict[str, ValueError]) -> None:
        with self._changed:
            self._ordered = {}
            ended = [(self._futures.pop(c.request_id, None), c) for c in done]  # None: failed by `close`
            failed = [(self._futures.pop(i, None), error) for i, error in refused.items()]
        for future, completion in ended:
            if future is not None:
                future.set_result(completion)
        for future, error in failed:
            if future is not None:
                future.set_exception(error)

    def _wait(self) -> bool:
        """Wait until the loop has work, or must send a heartbeat. False: it ends without having to tell other ranks."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._phase is not Phase.PAUSED)
            if self._closing:  # the first rank says so to the others, which wait for its word
                tells = self._lockstep is not None and self._phase is not Phase.PAUSED
                return tells and (self.leads or time.monotonic() < self._leave_at)
            if self.leads:
                patience = None if self._lockstep is None else _KEEPALIVE_S
                self._changed.wait_for(lambda: self._closing or self._phase is Phase.PAUSING or self._futures, patience)
            came = self._guests_came  # guests first, and before the orders, which tell the version of the weights
            self._changed.wait_for(lambda: self._guests_gone >= came)
            return not self._closing or self._lockstep is not None

    def _collect(self) -> Orders:
        """Collect the orders of the next step."""
        with self._changed:
            pause = self._phase is Phase.PAUSING
            if not pause:
                self._ordered, self._waiting = self._waiting, {}
            requests = tuple(self._ordered.values())
            dropped, self._aborted = tuple(self._aborted), {}
            version = self._engine.weight_version
            return Orders(add=requests, drop=dropped, pause=pause, stop=self._closing, version=version)

    def _carry_out(self, orders: Orders) -> tuple[list[Completion], dict[str, ValueError]]:
        """Carry out orders; return the completions, and the requests that the engine refused (each fails alone)."""
        if self._lockstep is not None and orders.version != self._engine.weight_version:
            raise RolloutError(
                f"this rank holds weights of version {self._engine.weight_version}, "
                f"its replica's first rank of version {orders.version}"
            )
        done = self._engine.drop(orders.drop) if orders.drop else []
        refused: dict[str, ValueError] = {}
        for request in orders.add:
            try:
                self._engine.add(request)
            except ValueError as error:
                refused[request.request_id] = error
        if not orders.pause and self._engine.has_unfinished():
            done += self._engine.step()
        return done, refused

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            pending, self._futures = list(self._futures.values()), {}
            self._waiting, self._ordered = {}, {}
            self._changed.notify_all()
        for future in pending:
            failure = RolloutError(f"the rollout engine stopped: {type(error).__name__}: {error}")
            failure.__cause__ = error
            future.set_exception(failure)

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise RolloutError(f"the rollout engine has stopped: {self._error}") from self._error
