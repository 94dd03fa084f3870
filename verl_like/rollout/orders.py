"""Orders that the first rank of a tensor-parallel replica gives the others before each step, and their broadcast."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl_like.rollout.rollout_engine import GenerationRequest, RolloutError

_SILENCE_S = 600.0  # a first rank that says nothing for so long is taken for dead: one step never takes that long


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Changes that come with the next step, in this order: requests dropped, requests added; or no step at all.

    version: of the first rank's weights; a rank that holds others refuses to go on.
    """

    add: tuple[GenerationRequest, ...] = ()
    drop: tuple[str, ...] = ()
    pause: bool = False
    stop: bool = False
    version: int | None = None


class Lockstep:
    """Agreement of one replica's ranks on the orders of each step. `group` is theirs alone, on CPU.

    No rank waits in it while the replica is paused, and an idle open one is sent empty orders, so its time limit says
    that a process is gone, never that there was nothing to do.
    """

    def __init__(self, group: dist.ProcessGroup, leader: int) -> None:
        self._group: dist.ProcessGroup | None = group
        self._leader = leader
        self.is_leader = dist.get_rank() == leader
        self._last = Orders()  # nothing but a step, as most orders are, needs no second message

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the replica's ranks. Raises RolloutError after `leave`."""
        if self._group is None:
            raise RolloutError("this rank has left its replica")
        return self._group

    def leave(self) -> None:
        """Close the connections: calls of other ranks in the group, waiting or later, fail there at once.

        No call of this rank may be under way in it.
        """
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None  # gloo closes its sockets with the last reference

    def agree(self, orders: Orders | None) -> Orders:
        """Exchange the leader's orders, and return them. The other ranks pass None, and wait."""
        message = b"" if orders is None or orders == Orders(version=self._last.version) else pickle.dumps(orders)
        size = torch.tensor([len(message)], dtype=torch.int64)
        self._broadcast(size)
        if not size:
            return Orders(version=self._last.version)
        payload = torch.empty(int(size), dtype=torch.uint8)
        if self.is_leader:
            payload = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self._broadcast(payload)
        self._last = pickle.loads(payload.numpy().tobytes())
        return self._last

    def meet(self) -> None:
        """Return when every rank has come here."""
        with _told():
            dist.barrier(group=self.group)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        with _told():
            dist.broadcast(tensor, src=self._leader, group=self.group)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except RolloutError:
        raise
    except RuntimeError as error:  # gloo's: a socket that was closed at once, silence at the time limit
        raise RolloutError(f"another rank of this replica has ended, left it or said nothing: {error}") from error


def lockstep_of(rank: int, world_size: int, size: int) -> Lockstep:
    """Build the lockstep of this rank's replica, of `size` neighbours.

    Collective over all ranks, because group creation is.
    """
    mine = None
    for first in range(0, world_size, size):
        limit = datetime.timedelta(seconds=_SILENCE_S)
        group = dist.new_group(list(range(first, first + size)), backend="gloo", timeout=limit)
        if first <= rank < first + size:
            mine = Lockstep(group, leader=first)
    assert mine is not None
    return mine
