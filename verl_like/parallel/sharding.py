"""Shards as plain tensors, and work done shard by shard: clipping, states of the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from verl_like.config import FSDPConfig


def fill_devices(fsdp: FSDPConfig, device: torch.device) -> tuple[torch.device, torch.device]:
    """Choose (device of the shards, device of the buffers)."""
    return (torch.device("cpu") if fsdp.offload_policy else device), device


def local_tensor(tensor: Tensor) -> Tensor:
    """Shard of this rank (a view), or the tensor itself when it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_index(tensor: Tensor) -> int:
    """Number of the part of the whole that this rank holds, the same on all replicas of it; 0 for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return 0
    index, position = 0, tensor.device_mesh.get_coordinate() or []
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            index = index * tensor.device_mesh.size(axis) + position[axis]
    return index


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) of the buffers that are a model's state, as its weights are; every rank holds them whole."""
    for path, part in model.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def add_l2_gradient(parameters: Iterable[nn.Parameter], coefficient: float) -> None:
    """Add coefficient * weight to each gradient: that of coefficient / 2 * |weights|^2, shard by shard."""
    if coefficient == 0:
        return
    for p in parameters:
        if p.grad is not None:
            local_tensor(p.grad).add_(local_tensor(p.detach()).to(p.grad.dtype), alpha=coefficient)


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of the given norm down to `max_norm` where they exceed it."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for p in parameters:
        if p.grad is not None:
            local_tensor(p.grad).mul_(scale.to(p.grad.device))


def named_states(parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Collect optimizer states by "<parameter>.<state>", the optimizer's own tensors; zero before the first step."""
    flat: dict[str, Tensor] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            state = optimizer.state[parameter]
            if not state:
                init_state(optimizer, parameter, state)
            flat |= {f"{name}.{key}": value for key, value in state.items()}
    return {key: value.detach() for key, value in flat.items()}


def init_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
    """Fill the state of a parameter that was never stepped, as the optimizer makes it at its first step."""
    if isinstance(optimizer, MakesState):
        optimizer.init_state(parameter, state)
        return
    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)  # torch's AdamW
    state["exp_avg"] = torch.zeros_like(parameter)
    state["exp_avg_sq"] = torch.zeros_like(parameter)


@runtime_checkable
class MakesState(Protocol):
    """An optimizer that knows the precision of its own states (engine/optim.py)."""

    def init_state(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> None: ...


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's per-parameter tensors; step counters stay where the optimizer wants them."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step":
                state[key] = value.to(device)
    release(device)


def release(moved_to: torch.device) -> None:
    """Give back to the device what a move to the host has freed, for users beside torch's allocator (vLLM)."""
    if moved_to.type == "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()


def sized_units(module: nn.Module, min_num_params: int, keep_out: Sequence[nn.Module]) -> list[nn.Module]:
    """Find modules to shard as units of at least so many parameters each, inner ones first, without `keep_out`.

    A module becomes a unit when what is left in it, after the units below it, is large enough
    (fsdp_config.wrap_policy.min_num_params; as torch's size_based_auto_wrap_policy). Lists are passed through.
    """
    units: list[nn.Module] = []

    def left_over(part: nn.Module) -> int:
        if any(part is excluded for excluded in keep_out):
            return 0
        left = sum(p.numel() for p in part._parameters.values() if p is not None)
        left += sum(left_over(child) for child in part.children())
        is_container = isinstance(part, nn.ModuleList | nn.ModuleDict)
        if left >= min_num_params and not is_container and part is not module:
            units.append(part)
            return 0
        return left

    left_over(module)
    return units
