"""The lockstep of a replica whose ranks are threads of one process."""

from __future__ import annotations

import pickle
import queue
import threading

from verl_like.rollout.orders import Orders

LIMIT_S = 20.0  # of every wait


class Network:
    """What joins the ranks of a replica: a queue for each follower, and a barrier."""

    def __init__(self, size: int) -> None:
        self.to: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(size)]
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self.sent: list[Orders] = []


class Wire:
    """A Lockstep within one process: orders travel pickled."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank
        self.is_leader = rank == 0

    def agree(self, orders: Orders | None) -> Orders:
        if not self.is_leader:
            assert orders is None
            return pickle.loads(self._network.to[self._rank].get(timeout=LIMIT_S))
        assert orders is not None
        self._network.sent.append(orders)
        message = pickle.dumps(orders)
        for follower in self._network.to[1:]:
            follower.put(message)
        return pickle.loads(message)

    def leave(self) -> None:
        """Nobody who waits here would notice; tests/contracts/test_lockstep.py has real sockets."""

    def meet(self) -> None:
        self._network.barrier.wait()
