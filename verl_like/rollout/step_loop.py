"""The thread that drives an engine: requests are added between steps, each future is resolved as its response ends.

One thread calls the engine's `step`; everything else that touches the engine (weights, scoring, sleep) does so inside
`exclusive()`, which needs an idle engine. With tensor parallelism every rank of the replica runs such a thread, and all
ranks must add the same requests at the same steps: the replica's first rank announces, once a step, which requests it
adds; the others wait until their caller has submitted these too. So the order of arrival may differ between ranks, the
set of requests may not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError

logger = logging.getLogger(__name__)


class SteppedEngine(Protocol):
    """What the loop drives. All calls come from one thread at a time."""

    def add(self, request: GenerationRequest) -> None: ...

    def step(self) -> list[Completion]:
        """One forward pass; the responses that ended with it."""
        ...

    def has_unfinished(self) -> bool: ...

    def abort(self) -> list[Completion]:
        """Drop all unfinished requests and say what they had sampled, with finish reason "abort"."""
        ...


class Lockstep:
    """Agreement of one replica's ranks on what is added and aborted at a step. `group` is theirs alone, on CPU."""

    def __init__(self, group: dist.ProcessGroup, leader: int) -> None:
        self.group = group
        self._leader = leader
        self.is_leader = dist.get_rank() == leader

    def agree(self, announcement: tuple[list[str], bool] | None) -> tuple[list[str], bool]:
        """The leader's (request ids to add, abort all). Followers pass None."""
        ids, abort = announcement or ([], False)
        header = torch.tensor([len(ids), int(abort)], dtype=torch.int64)
        dist.broadcast(header, src=self._leader, group=self.group)
        if header[0]:
            box = [ids]
            dist.broadcast_object_list(box, src=self._leader, group=self.group)
            ids = box[0]
        return ids, bool(header[1])


class StepLoop:
    """Owns the step thread, the queue in front of it and the futures behind it.

    To be made by the thread that will load weights, when the engine has started: steps run on its CUDA stream.
    """

    def __init__(
        self, engine: SteppedEngine, *, device: torch.device, lockstep: Lockstep | None = None, follow_timeout_s: float
    ) -> None:
        self._engine = engine
        self._device = device
        # The current stream belongs to the thread too. On one of its own, steps could overtake the loading of weights,
        # which the caller's thread does, and vLLM would read sampled tokens before they are there.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._lockstep = lockstep
        self._follow_timeout_s = follow_timeout_s
        self._engine_lock = threading.Lock()
        self._changed = threading.Condition()  # guards everything below
        self._waiting: dict[str, GenerationRequest] = {}  # submitted, not yet added; insertion order
        self._futures: dict[str, Future[Completion]] = {}
        self._abort = False
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollout-steps", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """Queue a request. Raises RolloutError when the loop has died or is closed."""
        with self._changed:
            self._raise_if_dead()
            if request.request_id in self._futures:
                raise ValueError(f"request id {request.request_id!r} is already in use")
            future: Future[Completion] = Future()
            self._futures[request.request_id] = future
            self._waiting[request.request_id] = request
            self._changed.notify_all()
        return future

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The engine to the caller alone, with no request in it."""
        with self._engine_lock:
            with self._changed:
                self._raise_if_dead()
                if self._futures:
                    raise RolloutError(f"{len(self._futures)} requests are still being generated")
            yield

    def abort_all(self) -> None:
        """End all pending requests and wait until they have ended. With tensor parallelism: call on every rank."""
        with self._changed:
            pending = list(self._futures.values())
            self._abort = bool(pending)
            self._changed.notify_all()
        wait_for(pending)

    def close(self) -> None:
        """Stop the thread. Requests still pending fail with RolloutError."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=60)
        self._fail(RolloutError("the rollout engine was shut down"))

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)  # the current device belongs to the thread
            torch.cuda.set_stream(self._stream)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting or self._futures)
                if self._closing:
                    return
            try:
                with self._engine_lock:
                    self._advance()
            except Exception as error:
                logger.exception("the rollout engine's step failed")
                self._fail(error)
                return

    def _advance(self) -> None:
        requests, abort = self._agree()
        for request in requests:
            self._add(request)
        if abort:
            done = self._engine.abort()
        else:
            done = self._engine.step() if self._engine.has_unfinished() else []
        with self._changed:
            ended = [(self._futures.pop(completion.request_id), completion) for completion in done]
        for future, completion in ended:
            future.set_result(completion)

    def _add(self, request: GenerationRequest) -> None:
        """A request that the engine refuses fails alone."""
        try:
            self._engine.add(request)
        except ValueError as error:
            with self._changed:
                future = self._futures.pop(request.request_id)
            future.set_exception(error)

    def _agree(self) -> tuple[list[GenerationRequest], bool]:
        """The requests to add now, in the order all ranks of the replica use, and whether to abort."""
        with self._changed:
            ids, abort = list(self._waiting), self._abort
            self._abort = False
        if self._lockstep is not None:
            ids, abort = self._lockstep.agree((ids, abort) if self._lockstep.is_leader else None)
        with self._changed:
            self._await_submission(ids)
            return [self._waiting.pop(request_id) for request_id in ids], abort

    def _await_submission(self, ids: list[str]) -> None:
        deadline = time.monotonic() + self._follow_timeout_s
        while missing := [i for i in ids if i not in self._waiting]:
            left = deadline - time.monotonic()
            if self._closing or left <= 0 or not self._changed.wait(left):
                raise RolloutError(f"this rank was not given requests {missing[:4]} of its replica")

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            pending, self._futures, self._waiting = list(self._futures.values()), {}, {}
        for future in pending:
            failure = RolloutError(f"the rollout engine stopped: {type(error).__name__}: {error}")
            failure.__cause__ = error
            future.set_exception(failure)

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise RolloutError(f"the rollout engine has stopped: {self._error}") from self._error
