"""Faults that the twin must see: each is planted in a process of the twin before its case runs (Case.before)."""

from __future__ import annotations

from typing import Any

import torch


def tensor_on_the_cpu(rank: int) -> None:
    """Targets stay on the CPU."""
    from verl_like.models import packing

    packing._MOVED = tuple(name for name in packing._MOVED if name != "targets_N")


def forgotten_all_reduce(rank: int) -> None:
    """The last rank takes its own norm for everyone's, as where an early return leaves a sum out."""
    from verl_like.parallel import ulysses

    if rank == 1:
        ulysses._Join.forward = staticmethod(lambda ctx, values, group: values.clone())  # type: ignore[method-assign]


def item_per_micro_batch(rank: int) -> None:
    """A loss that logs its own value."""
    from verl_like.algorithms.objectives import PolicyObjective

    own = PolicyObjective.__call__

    def logging(self: Any, *arguments: Any) -> Any:
        loss, metrics = own(self, *arguments)
        loss.item()
        return loss, metrics

    PolicyObjective.__call__ = logging  # type: ignore[method-assign]


def bucket_twice_as_large(rank: int) -> None:
    """Buckets of a weight sync are made for float32 where bfloat16 travels."""
    from verl_like.weight_sync.wired import WiredSender

    own = WiredSender._memory
    WiredSender._memory = lambda self, place, size: own(self, place, 2 * size)  # type: ignore[method-assign]


def float64_optimizer_states(rank: int) -> None:
    """States of the optimizer in another precision than the weights."""
    from verl_like.parallel import sharding

    own = sharding.init_state

    def wrong(optimizer: Any, parameter: Any, state: dict[str, torch.Tensor]) -> None:
        own(optimizer, parameter, state)
        state["exp_avg"] = state["exp_avg"].double()

    sharding.init_state = wrong


def offload_keeps_a_reference(rank: int) -> None:
    """Shards that went to the host are still held on the device by somebody."""
    from verl_like.parallel.fsdp import Sharding

    own, held = Sharding.move_params, []

    def holding(self: Any, device: torch.device) -> None:
        if device.type == "cpu":
            held.extend(p.to_local().detach() for p in self.root.parameters())
        own(self, device)

    Sharding.move_params = holding  # type: ignore[method-assign]


def empty_micro_batch_skips(rank: int) -> None:
    """A rank without rows returns early, in place of a placeholder's pass."""
    from verl_like.engine.fsdp import FSDPEngine

    own = FSDPEngine._backward
    FSDPEngine._backward = lambda self, rows, *more: {} if rows is None else own(self, rows, *more)  # type: ignore[method-assign]


def shards_of_eight(rank: int) -> None:
    """Shards are cut as for one machine of eight, whatever the number of ranks."""
    from verl_like.config.mesh import MeshSizes

    MeshSizes.copy = property(lambda self: min(8, self.world))  # type: ignore[assignment, method-assign]
