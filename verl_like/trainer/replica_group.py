"""Rollout replicas that fail one by one: a worker group for each, called as one.

A rank of a worker group that dies takes the others of its group along, because they would wait for it for ever. The
replicas of a pool that only samples never wait for each other, so each is a group of its own: one that is lost is left
out from then on, and another is started in its place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl_like.cluster.worker_group import PendingResult, WorkerError, WorkerGroup

logger = logging.getLogger(__name__)

_AGAIN_S, _LONGEST_S = 30.0, 600.0  # until another start is tried, after one that failed; doubled each time


class Starting(WorkerGroup, Protocol):
    """Worker group whose workers may still be built."""

    def started(self) -> bool:
        """True where `wait_started` would return or raise at once."""
        ...

    def wait_started(self) -> None: ...


class ReplicaLost(WorkerError):
    """Error of a replica that is gone during a call; the others have made it, and go on."""


@dataclass(slots=True, eq=False)
class Replica:
    """Worker group of one replica.

    number: of all that were ever started.
    close: stops it, and gives back its devices; may be called twice.
    """

    number: int
    group: Starting
    close: Callable[[], None]


class Fleet:
    """WorkerGroup over one group for each replica.

    Calls go to the replicas that are there; arguments and results are those of all their ranks, in this order.

    start(number): begins a replica, and returns before it is built; numbers are those of all that were ever started.
    watch: the watchdog's look, which ends groups that do not get on.
    """

    def __init__(self, start: Callable[[int], Replica], size: int, watch: Callable[[], None] = lambda: None) -> None:
        self._start, self._size, self._next = start, size, 0
        self._in_vain, self._not_before = 0, 0.0  # starts that failed in a row, and when another may be tried
        self.watch = watch
        self._coming: list[Replica] = []
        self.num_lost = 0
        self.replicas = [self._begin() for _ in range(size)]

    @property
    def world_size(self) -> int:
        """Number of ranks that are there."""
        return sum(replica.group.world_size for replica in self.replicas)

    def wait_started(self) -> None:
        """Wait until all workers are built; raises the error of one that fails."""
        for replica in self.replicas:
            replica.group.wait_started()

    def call(
        self, method: str, per_rank: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any] | None = None
    ) -> FleetPending:
        """Call a method on every rank; see WorkerGroup.

        The result's `wait` raises ReplicaLost where others are left.
        """
        parts: list[tuple[Replica, PendingResult]] = []
        place = 0
        for replica in list(self.replicas):
            count = replica.group.world_size
            try:
                parts.append((replica, replica.group.call(method, per_rank[place : place + count], kwargs)))
            except WorkerError as error:  # it was lost, and nobody has looked since
                self.lose(replica, error)
            place += count
        return FleetPending(self, parts)

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> FleetPending:
        """Call a method with the same arguments on every rank; see WorkerGroup."""
        return self.call(method, [args] * self.world_size, kwargs)

    def lose(self, replica: Replica, error: WorkerError) -> None:
        """Leave a replica out that is gone. Raises `error` where it was the last."""
        if replica not in self.replicas:
            return
        self.replicas.remove(replica)
        self.num_lost += 1
        replica.close()
        if not self.replicas:
            raise error
        logger.error(
            "%s\n%d of %d rollout replicas go on; another is started in its place",
            *(str(error).splitlines()[0], len(self.replicas), self._size),
        )

    def refill(self) -> None:
        """Start replacements for those that were lost, and return at once; `newcomers` has those that are ready."""
        while len(self.replicas) + len(self._coming) < self._size and time.monotonic() >= self._not_before:
            try:
                self._coming.append(self._begin())
            except (ValueError, RuntimeError, OSError) as error:  # no room, for instance: its node is gone too
                self._failed(error)

    def newcomers(self) -> list[Replica]:
        """Return replacements that are built since the last call, and belong to the fleet from now on."""
        ready = [replica for replica in self._coming if replica.group.started()]
        self._coming = [replica for replica in self._coming if replica not in ready]
        joined = []
        for replica in ready:
            try:
                replica.group.wait_started()
                joined.append(replica)
            except WorkerError as error:
                replica.close()
                self._failed(error)
        self.replicas += joined
        if joined:
            self._in_vain, self._not_before = 0, 0.0
            logger.warning("%d of %d rollout replicas are there again", len(self.replicas), self._size)
        return joined

    def shutdown(self) -> None:
        """Stop all replicas; see WorkerGroup."""
        for replica in [*self.replicas, *self._coming]:
            replica.close()

    def _begin(self) -> Replica:
        number, self._next = self._next, self._next + 1
        return self._start(number)

    def _failed(self, error: Exception) -> None:
        wait_s = min(_AGAIN_S * 2**self._in_vain, _LONGEST_S)
        self._in_vain, self._not_before = self._in_vain + 1, time.monotonic() + wait_s
        what = (str(error).splitlines() or [repr(error)])[0]
        logger.error("a rollout replica could not be started: %s; another one is tried in %.0f s", what, wait_s)


class FleetPending:
    """Results of one call on all replicas."""

    def __init__(self, fleet: Fleet, parts: Sequence[tuple[Replica, PendingResult]]) -> None:
        self._fleet, self._parts = fleet, parts

    def done(self) -> bool:
        """True where `wait` would return or raise at once."""
        return all(part.done() for _, part in self._parts)

    def look(self) -> None:
        """Leave out replicas that have failed or hang, of a call that none should have ended.

        Raises the last one's error.
        """
        self._fleet.watch()
        for replica, part in self._parts:
            if replica in self._fleet.replicas and part.done():
                try:
                    part.wait()
                except WorkerError as error:
                    self._fleet.lose(replica, error)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait for one result from each rank.

        Raises ReplicaLost, with the first error, when some replica fails and others are left; the error itself when
        none is.
        """
        values: list[Any] = []
        first: WorkerError | None = None
        for replica, part in self._parts:
            try:
                values += part.wait(timeout)
            except WorkerError as error:
                first = first or error
                self._fleet.lose(replica, error)
        if first is not None:
            raise ReplicaLost(str(first).splitlines()[0], rank=first.rank, method=first.method) from first
        return values
