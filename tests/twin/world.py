"""Ranks of the twin: one of many that are all fake, or a few processes that really exchange their CPU tensors.

In both, collectives on the device move nothing. A rank of a large world answers with its own values where ranks agree
on numbers; in a small one they go through gloo, as in a run, so that each rank does what it would do there.
"""

from __future__ import annotations

import datetime
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

from verl_like.engine import packing_check
from verl_like.parallel.dist import ProcessInfo


def alone(world: int, rank: int) -> ProcessInfo:
    """Join a fake world of this size as one of its ranks.

    Its weights are never real: the first rank of a run reads them, here it takes its place in the groups alone.
    """
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    dist.broadcast_object_list = lambda objects, *_, **__: None

    def all_gather_object(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [mine] * len(found)

    dist.all_gather_object = all_gather_object
    return _process(world, rank, rank or -1)


def together(world: int, rank: int, folder: str, timeout_s: float) -> ProcessInfo:
    """Join a small world whose ranks are processes: CPU tensors go through gloo. Collective."""
    store = dist.FileStore(f"{folder}/store", world)
    wait = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("cpu:gloo,cuda:fake", rank=rank, world_size=world, store=store, timeout=wait)
    return _process(world, rank, rank)


def _process(world: int, rank: int, number: int) -> ProcessInfo:
    packing_check._TOLERANCE, packing_check._HALF_TOLERANCE = (
        {},
        math.inf,
    )  # it compares values, which there are none of
    return ProcessInfo(rank=number, world_size=world, local_rank=rank % 8, device=torch.device("cuda", 0))
