"""Connection of the driver to a pool's rollout replicas: a link to each, one client over all, the actor's weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

from verl_like.cluster.worker_group import WorkerError, WorkerGroup, WorkerTimeout
from verl_like.config.batch_plan import BatchPlan
from verl_like.rollout.client import RolloutClient
from verl_like.rollout.link import SocketLink
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError
from verl_like.rollout.router import Router
from verl_like.trainer.replica_group import Fleet, FleetPending, Replica, ReplicaLost

T = TypeVar("T")
logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_PARTING_S = 30.0  # for the last step of engines that are to end
_ECHO_S = 5.0  # a process that is gone is known here first, and by its name a little later


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Links to all replicas, in the order of their ranks, and the router over them, which holds what is submitted."""

    links: list[SocketLink]
    router: Router
    ranks_each: int

    @classmethod
    def open(
        cls, ways: Sequence[tuple[tuple[str, int], bytes] | None], ranks_each: int, most: int | None, by_rounds: bool
    ) -> Replicas:
        """Connect to the first rank of every replica.

        Args:
            ways: of each rank, what `open_link` gave.
            ranks_each: ranks of a replica.
            most: requests that run in each; None: all.
            by_rounds: nothing is left over from one call of `sample` to the next.
        """
        links: list[SocketLink] = []
        try:
            for rank, way in enumerate(ways):
                if way is not None:
                    links.append(SocketLink(f"the rollout engine of rank {rank}", *way))
        except BaseException:
            for link in links:
                link.close()
            raise
        if by_rounds:  # which replica samples what must be the same after a resume: no length seen before may tell
            router = Router(links, max_running_requests=most, deterministic=True, source_of=lambda request: None)
        else:
            router = Router(links, max_running_requests=most)
        router.hold()
        return cls(links=links, router=router, ranks_each=ranks_each)

    def release(self) -> list[tuple[int]]:
        """Send the requests that are held; return, for each rank of the group, the argument of its call of `serve`."""
        self.router.release()
        return [(link.num_orders,) for link in self.links for _ in range(self.ranks_each)]


class SamplingClient:
    """Client of a router that can be closed alone: it then aborts all, and refuses what its owner still submits."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = threading.Lock()
        self._closed = False
        self.abort, self.snapshot, self.serving_s = router.abort, router.snapshot, router.serving_s
        self.occupancy = router.occupancy

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """Queue one request; see RolloutClient."""
        with self._lock:
            if self._closed:
                raise RolloutError(f"request {request.request_id}: the work it belongs to has failed")
            return self._router.submit(request)

    def close(self) -> None:
        """Close the client: abort its pending requests."""
        with self._lock:
            self._closed = True
        self._router.abort()


class RolloutGroup:
    """Rollout engines of a pool.

    max_running_requests: in each replica; None: all.
    has_weights: tells whether the engines hold the actor's weights.
    """

    def __init__(
        self,
        group: WorkerGroup,
        plan: BatchPlan,
        *,
        timeout_s: float,
        max_running_requests: int | None = None,
        has_weights: Callable[[], bool] = lambda: True,
    ) -> None:
        self.group, self.plan, self.timeout_s, self._has_weights = group, plan, timeout_s, has_weights
        self._by_rounds = plan.asynchronous is None
        self._max_running_requests = max_running_requests
        self._replicas: Replicas | None = None  # from the first call of `sample` on

    def sample(self, work: Callable[[RolloutClient], Future[T]]) -> T:
        """Let the replicas sample until the future that `work` returns is done; return its result.

        work(client): submits what is to begin together, and returns; more may be submitted later, from any thread. If
        it fails, all that is pending is aborted, its client refuses from then on, and its error is raised. What is
        pending otherwise stays where it is, and goes on in the next call.
        Raises WorkerError when a rank fails; then the pending futures fail, and there is no next call. RuntimeError
        while the engines hold other weights than the actor.
        """
        replicas = self._connected()
        client = SamplingClient(replicas.router)
        try:
            future = work(client)
        except BaseException:
            client.close()
            raise
        told: Future[list[Future[None]]] = Future()

        def end(ended: Future[T]) -> None:
            replicas.router.hold()
            if ended.cancelled() or ended.exception() is not None:
                client.close()
            told.set_result([link.pause() for link in replicas.links])

        try:
            served = replicas.release()
            future.add_done_callback(end)
            self.group.call("rollout.serve", served).wait(timeout=self.timeout_s)
            for paused in told.result(self.timeout_s):
                paused.result(self.timeout_s)  # what ended there is known here: the next call begins with nothing of it
        except BaseException:
            self.close()
            raise
        return future.result()

    def paused(self) -> AbstractContextManager[None]:
        """Allow calls of the processes inside: between two calls of `sample` they always can be called."""
        return nullcontext()

    renewed = paused

    def close(self) -> None:
        """Cut the links; pending requests fail."""
        replicas, self._replicas = self._replicas, None
        if replicas is not None:
            replicas.router.close()

    def _connected(self) -> Replicas:
        if not self._has_weights():
            raise RuntimeError("the actor has changed since the last weight sync: sync before sampling")
        if self._replicas is None:
            ways = self.group.call_all("rollout.open_link").wait(timeout=self.timeout_s)
            each, most = self.plan.tensor_parallel_size, self._max_running_requests
            self._replicas = Replicas.open(ways, each, most, self._by_rounds)
        return self._replicas


class StandingRolloutGroup:
    """Rollout engines of a pool that does nothing else: open from the first call of `sample` on, but for `paused`.

    Requests that a call leaves pending go on after it, while the policy trains. A replica that is lost is left out: its
    requests go on elsewhere from the tokens that were told last; another joins with the next weights.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        timeout_s: float,
        max_running_requests: int | None = None,
        has_weights: Callable[[], bool] = lambda: True,
    ) -> None:
        self._fleet, self.timeout_s, self._has_weights = fleet, timeout_s, has_weights
        self._links: dict[Replica, SocketLink] = {}
        self._router = Router((), max_running_requests=max_running_requests, requeue=True)
        self._router.hold()
        self._serving: FleetPending | None = None

    def sample(self, work: Callable[[RolloutClient], Future[T]]) -> T:
        """Return the result of the future that `work` returns; see RolloutGroup.

        Raises WorkerError when the last replica is lost, and after `timeout_s`.
        """
        if not self._has_weights():
            raise RuntimeError("the actor has changed since the last weight sync: sync before sampling")
        self._open()
        client = SamplingClient(self._router)
        try:
            return self._result(work(client))
        except BaseException:
            client.close()
            raise

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause every engine between two steps; requests under way stay there."""
        was_open = self._serving is not None
        self._pause(self.timeout_s)
        yield
        if was_open:
            self._open()

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Pause for new weights: replicas started in place of lost ones are in the fleet from now on."""
        with self.paused():
            self._fleet.newcomers()
            yield

    def close(self) -> None:
        """Pause, and cut the links; pending requests fail."""
        try:
            self._pause(min(_PARTING_S, self.timeout_s))
        except (RolloutError, WorkerError) as error:
            logger.debug("the rollout pool ends without a pause: %r", error)
        self._router.close()

    def _open(self) -> None:
        if self._serving is not None:
            return
        new = [replica for replica in self._fleet.replicas if replica not in self._links]
        for replica in new:
            try:
                ways = replica.group.call_all("rollout.open_link").wait(timeout=self.timeout_s)
            except WorkerError as error:
                self._fleet.lose(replica, error)
                continue
            way = next(way for way in ways if way is not None)
            try:
                self._links[replica] = SocketLink(f"rollout replica {replica.number}", *way)
            except RolloutError as error:  # it has died since
                self._fleet.lose(replica, WorkerError(str(error), rank=0, method="rollout.open_link"))
                continue
            self._router.attach(self._links[replica])
        self._router.release()
        orders = [(self._links[r].num_orders,) for r in self._fleet.replicas for _ in range(r.group.world_size)]
        self._serving = self._fleet.call("rollout.serve", orders)

    def _pause(self, timeout_s: float) -> None:
        serving, self._serving = self._serving, None
        if serving is None:
            return
        self._router.hold()
        pauses = [(replica, self._links[replica].pause()) for replica in self._fleet.replicas]
        with suppress(ReplicaLost):
            serving.wait(timeout=timeout_s)
        for replica, paused in pauses:
            if replica in self._fleet.replicas:
                try:
                    paused.result(timeout_s)
                except RolloutError as error:  # it has died since its last answer
                    self._fleet.lose(replica, WorkerError(str(error), rank=0, method="rollout.serve"))

    def _result(self, future: Future[T]) -> T:
        """Wait for the future's result. Raises WorkerTimeout after `timeout_s`."""
        end = time.monotonic() + self.timeout_s
        while time.monotonic() < end:
            self._look()
            try:
                return future.result(_LOOK_S)
            except NotYet:
                if future.done():  # its own
                    raise
            except RolloutError:
                give_up = time.monotonic() + _ECHO_S  # which process it was says more
                while time.monotonic() < give_up:
                    self._look()
                    time.sleep(_LOOK_S)
                raise
        what = f"no batch within trainer.rpc_timeout={self.timeout_s:g} s"
        raise WorkerTimeout(what, rank=0, method="rollout.serve")

    def _look(self) -> None:
        """Notice replicas that are gone, and have others started, which may take seconds: the others sample meanwhile.

        Raises the error of the last one.
        """
        if self._serving is not None:
            self._serving.look()
            self._fleet.refill()
