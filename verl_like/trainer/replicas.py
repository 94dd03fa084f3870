"""The driver's way to the rollout replicas of a worker group: a link to each, and one client over all."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from verl_like.rollout.link import SocketLink
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError
from verl_like.rollout.router import Router


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Links to all replicas, in the order of their ranks, and the router over them, which holds what is submitted."""

    links: list[SocketLink]
    router: Router
    ranks_each: int

    @classmethod
    def open(cls, ways: Sequence[tuple[tuple[str, int], bytes] | None], ranks_each: int, most: int | None) -> Replicas:
        """Connect to the first rank of every replica. ways: of each rank, what `open_link` gave. most: requests
        that run in each (None: all)."""
        links: list[SocketLink] = []
        try:
            for rank, way in enumerate(ways):
                if way is not None:
                    links.append(SocketLink(f"the rollout engine of rank {rank}", *way))
        except BaseException:
            for link in links:
                link.close()
            raise
        # Which replica samples what must be the same after a resume: no length that was seen before may tell.
        router = Router(links, max_running_requests=most, deterministic=True, source_of=lambda request: None)
        router.hold()
        return cls(links=links, router=router, ranks_each=ranks_each)

    def release(self) -> list[tuple[int]]:
        """Send what is held; for each rank of the group, the argument of its call of `serve`."""
        self.router.release()
        return [(link.num_orders,) for link in self.links for _ in range(self.ranks_each)]


class SamplingClient:
    """A router's client that can be closed without it: then it aborts all, and refuses what its owner still submits."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = threading.Lock()
        self._closed = False
        self.abort, self.snapshot, self.serving_s = router.abort, router.snapshot, router.serving_s

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """See RolloutClient."""
        with self._lock:
            if self._closed:
                raise RolloutError(f"request {request.request_id}: the work it belongs to has failed")
            return self._router.submit(request)

    def close(self) -> None:
        """End what is pending by aborting it."""
        with self._lock:
            self._closed = True
        self._router.abort()
