"""Weights over a network: the sender and all receivers form a process group of their own, beside the default ones.

gloo on a CPU, NCCL on CUDA; its store is the sender's.
"""

from __future__ import annotations

import datetime
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.rollout.wire import address_towards
from verl_like.weight_sync.wired import Deadline, WiredReceiver, WiredSender

Result = TypeVar("Result")
_POLL_S = 2e-4


class BroadcastSender(WiredSender):
    """On the trainer's first rank; its other ranks only take part in the gathers (channel.TakesPart)."""

    _whole = True

    _group: Any = None

    def _meeting_place(self) -> tuple[str, int]:
        server = socket.create_server((self._host, 0))  # by itself the store listens to every network
        options = {"wait_for_workers": False, "master_listen_fd": server.fileno()}
        self._store: Any = dist.TCPStore(self._host, server.getsockname()[1], is_master=True, **options)
        server.detach()
        return self._host, self._store.port

    def _prepare(self, deadline: Deadline) -> None:
        if self._group is None:
            size = len(self._names) + 1
            make = partial(_group, self._store, self._host, 0, size, self._device, deadline.left)
            try:
                self._group = _in_time(make, deadline)
            except (RuntimeError, OSError) as error:
                raise self._undelivered(error, deadline) from error

    def _give(self, data: Tensor, deadline: Deadline) -> None:
        try:
            _broadcast(self._group, data, deadline)
        except (RuntimeError, OSError) as error:
            raise self._undelivered(error, deadline) from error

    def close(self) -> None:
        """Close the wires, and leave the process group and its store."""
        super().close()
        _leave(self._group)
        self._group = self._store = None


class BroadcastReceiver(WiredReceiver):
    """On every rank that receives. Tensors are views of buckets, which live as long as they do."""

    _group: Any = None

    def _prepare(self, deadline: Deadline) -> None:
        assert self._way.store is not None, "the way of another channel"
        if self._group is None:
            size, rank = len(self._way.receivers) + 1, self._rank + 1

            def make() -> Any:
                host, port = self._way.store or ("", 0)
                store = dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=deadline.left))
                return _group(store, address_towards(host, port), rank, size, self._device, deadline.left)

            try:
                self._group = _in_time(make, deadline)
            except (RuntimeError, OSError) as error:
                raise self._undelivered(error, deadline, "its process group had not formed") from error

    def _get(self, size: int, place: Any, deadline: Deadline) -> Tensor:
        data = torch.empty(size, dtype=torch.uint8, device=self._device)
        _broadcast(self._group, data, deadline)
        return data

    def close(self) -> None:
        """Close the wire to the sender, and leave the process group."""
        super().close()
        _leave(self._group)
        self._group = None


def _group(store: Any, own_address: str, rank: int, size: int, device: torch.device, seconds: float) -> Any:
    """A group that torch does not know as one of its own: the default group stays as it is, or absent."""
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = datetime.timedelta(seconds=10 * seconds + 600)  # NCCL's own end is that of the whole process
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
    gloo._timeout = datetime.timedelta(seconds=seconds)
    return dist.ProcessGroupGloo(store, rank, size, gloo)


def _broadcast(group: Any, data: Tensor, deadline: Deadline) -> None:
    """From rank 0. Raises RuntimeError, by the deadline at the latest."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = datetime.timedelta(seconds=max(deadline.left, 1e-3))
    work = group.broadcast([data], options)
    if data.device.type == "cpu":
        work.wait()
        return
    while not work.is_completed():  # waiting would only make the device's next kernels wait
        if not deadline.left:
            group.abort()
            raise RuntimeError("NCCL was waited for until the deadline")
        time.sleep(_POLL_S)
    work.wait()


def _in_time(work: Callable[[], Result], deadline: Deadline) -> Result:
    """For what waits for a store, whose own limit does not hold when the store's process is stopped."""
    done: SimpleQueue[Result | Exception] = SimpleQueue()

    def run() -> None:
        try:
            done.put(work())
        except Exception as error:
            done.put(error)

    threading.Thread(target=run, name="weights-group", daemon=True).start()
    try:
        result = done.get(timeout=max(deadline.left, 1e-3))
    except Empty:
        raise RuntimeError("the process group did not form in time") from None
    if isinstance(result, Exception):
        raise result
    return result


def _leave(group: Any) -> None:
    """Let go of a group, and of what hangs in it."""
    if group is not None:
        group.abort()
