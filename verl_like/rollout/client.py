"""Requests by future, from any thread of the driver: the client's methods, and the link to a replica.

    threads of the driver --submit, abort--> Router --send(orders)--> Link --> a replica's step loop
    futures <--resolved in the link's thread-- Router <--events, in batches-- Link <--/

A link is one long-lived connection to one replica: orders out, batches of events in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError, Sampled, UnloadedError

_JOIN_S = 10.0
_LOOK_S = 0.002  # between two looks whether all has ended: less would take the step thread's time


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Counts of the living replicas and their requests.

    replicas: replicas that live.
    held: those that serve nothing now.
    idle: those that serve, and have no request.
    pending: requests in flight, wherever they are.
    """

    replicas: int
    held: int
    idle: int
    pending: int


class RolloutClient(Protocol):
    """Client that samples for many threads at once. All methods may be called from any; none but `close` waits long."""

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """Queue one request; its id must not be pending. Callbacks of the future must not wait for other requests.

        The future raises ValueError for a request that the engine refuses, RolloutError when its replica died.
        Raises ValueError for an id in use, RolloutError when the client is closed or no replica is left.
        """
        ...

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (None: all): their futures get the tokens so far, with reason "abort".

        Unknown ids are ignored.
        """
        ...

    def snapshot(self) -> dict[str, Sampled]:
        """Tokens sampled so far of every pending request, by id."""
        ...

    def serving_s(self) -> float:
        """Seconds that replicas have served so far: a clock that stands while they sleep or load weights."""
        ...

    def occupancy(self) -> Occupancy:
        """Count what the replicas are doing."""
        ...

    def close(self) -> None:
        """Close the client: pending requests end with RolloutError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Batch of events at one replica since the last batch, in this order.

    completions: requests that ended.
    refusals: (request id, error) of requests that failed alone.
    progress: all that is sampled so far of requests under way, as often as the link likes.
    death: why the replica serves nothing any more; no event follows it.
    """

    completions: Sequence[Completion] = ()
    refusals: Sequence[tuple[str, Exception]] = ()
    progress: Mapping[str, Sampled] = field(default_factory=dict)
    death: str | None = None


class Link(Protocol):
    """Connection to one replica."""

    name: str
    """In messages: which replica."""

    def start(self, on_events: Callable[[Events], None]) -> None:
        """Hand over events from now on, from one thread, in order."""
        ...

    def send(self, add: Sequence[GenerationRequest], abort: Sequence[str]) -> None:
        """Send orders to the replica, carried out in the order of the calls.

        Returns at once, calls nobody back, and raises nothing: a replica that cannot be reached is an event.
        """
        ...

    def snapshot(self) -> dict[str, Sampled]:
        """Tokens that the replica's requests have sampled so far; empty for a dead replica."""
        ...

    def close(self) -> None:
        """Close the link: it hands over no further events. The replica itself is left alone."""
        ...


class Sampler(Protocol):
    """Methods that a LocalLink needs of an engine: a RolloutEngine, or a StepLoop alone."""

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]: ...

    def abort(self, request_ids: Sequence[str] | None) -> None: ...

    def snapshot(self) -> dict[str, Sampled]: ...


class LocalLink:
    """Link to a replica in this process.

    The replica's RolloutError means that it is dead, unless it only lacks weights; any other error is a refused
    request.

    interval_s: events this close together are one batch, unless they were all there are.
    progress_s: seconds between two reports of progress; None: never.
    """

    def __init__(
        self, name: str, engine: Sampler, *, interval_s: float = 0.02, progress_s: float | None = None
    ) -> None:
        self.name = name
        self._engine = engine
        self._interval_s, self._progress_s = interval_s, progress_s
        self._under_way: set[str] = set()
        self._ended: SimpleQueue[_Ended | Callable[[], None] | None] = SimpleQueue()
        self._on_events: Callable[[Events], None] | None = None
        self._thread = threading.Thread(target=self._run, name=f"link-{name}", daemon=True)

    def start(self, on_events: Callable[[Events], None]) -> None:
        self._on_events = on_events
        self._thread.start()

    def send(self, add: Sequence[GenerationRequest], abort: Sequence[str]) -> None:
        self._under_way.update(request.request_id for request in add)
        for request, future in zip(add, self._engine.submit_all(add), strict=True):
            future.add_done_callback(partial(self._end, request.request_id))
        if abort:
            try:
                self._engine.abort(abort)
            except Exception as error:
                self._died(error)

    def snapshot(self) -> dict[str, Sampled]:
        try:
            return self._engine.snapshot()
        except Exception as error:
            self._died(error)
            return {}

    def afterwards(self, action: Callable[[], None]) -> None:
        """Call `action` in the link's thread, when all that has ended so far was handed over."""
        self._ended.put(action)

    def close(self) -> None:
        self._ended.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _end(self, request_id: str, future: Future[Completion]) -> None:
        self._under_way.discard(request_id)
        self._ended.put((request_id, future))

    def _died(self, error: Exception) -> None:
        what = f"{type(error).__name__}: {error}"
        self._ended.put(("", error if isinstance(error, RolloutError) else RolloutError(what)))

    def _run(self) -> None:
        assert self._on_events is not None
        told = time.monotonic()
        while True:
            try:
                batch = [self._ended.get(timeout=self._progress_s)]
                sent_at = time.monotonic() + self._interval_s
                while self._under_way and (left := sent_at - time.monotonic()) > 0:
                    time.sleep(min(left, _LOOK_S))
            except Empty:
                batch = []
            while not self._ended.empty():
                batch.append(self._ended.get())
            if None in batch:
                return
            progress: dict[str, Sampled] = {}
            if self._progress_s is not None and time.monotonic() - told >= self._progress_s:
                progress, told = self.snapshot(), time.monotonic()
            ended = [item for item in batch if isinstance(item, tuple)]
            if ended or progress:
                self._on_events(_events(ended, progress))
            for item in batch:
                if callable(item):
                    item()


_Ended = tuple[str, Future[Completion] | Exception]


def _events(batch: Sequence[_Ended], progress: Mapping[str, Sampled]) -> Events:
    completions: list[Completion] = []
    refusals: list[tuple[str, Exception]] = []
    death: str | None = None
    for request_id, ended in batch:
        error = ended if isinstance(ended, Exception) else ended.exception()
        if isinstance(ended, Future) and error is None:
            completions.append(ended.result())
        elif isinstance(error, RolloutError) and not isinstance(error, UnloadedError):
            death = death or str(error)
        elif isinstance(error, Exception):
            refusals.append((request_id, error))
    return Events(completions=completions, refusals=refusals, progress=progress, death=death)
