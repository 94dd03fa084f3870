"""FSDP2 applied from outside: mesh, wrapping, gradient clipping, offload. The model files know nothing of it.

Gradients are plain SUMS over ranks: losses are divided by global counts already, so FSDP's own averaging is switched
off here, in one place (`_sum_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from verl_like.config import FSDPConfig


def build_mesh(device: torch.device, fsdp_size: int) -> DeviceMesh:
    """One axis over all ranks; with 0 < fsdp_size < world size two axes: replicate between groups, shard inside."""
    world = dist.get_world_size()
    if fsdp_size <= 0 or fsdp_size >= world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    if world % fsdp_size:
        raise ValueError(f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world} ranks")
    return init_device_mesh(device.type, (world // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


def shard_model(
    model: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    fsdp: FSDPConfig,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Shard every layer given, then the root (embedding, final norm, head), in place.

    compute_dtype: what weights are gathered in; reductions are float32, the shards keep the dtype they have.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if fsdp.offload_policy else OffloadPolicy()
    for layer in layers:
        fully_shard(
            layer, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=fsdp.reshard_after_forward
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=False)
    if not fsdp.offload_policy:
        model.to(device)
    _sum_gradients(model)


def _sum_gradients(model: nn.Module) -> None:
    # gloo has no scaled sum: a factor of 1 alone fails there, forced sum reduction makes it a plain sum on all backends
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward pass reduces gradients over the ranks or adds them up unsharded on each."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(enabled)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights that a forward pass without backward leaves behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def add_l2_gradient(parameters: Iterable[nn.Parameter], coefficient: float) -> None:
    """Add coefficient * weight to each gradient: that of coefficient / 2 * |weights|^2, shard by shard."""
    if coefficient == 0:
        return
    for p in parameters:
        if p.grad is not None:
            local_tensor(p.grad).add_(local_tensor(p.detach()).to(p.grad.dtype), alpha=coefficient)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """2-norm of the whole gradient, the same on every rank (collective)."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of the given norm down to `max_norm` where they exceed it."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for p in parameters:
        if p.grad is not None:
            local_tensor(p.grad).mul_(scale.to(p.grad.device))


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard (a view), or the tensor itself when it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The full tensor on every rank, cast before the gather so that only `dtype` travels (collective)."""
    local = local_tensor(tensor.detach()).to(device=device, dtype=dtype)
    if not isinstance(tensor, DTensor):
        return local
    shard = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return shard.full_tensor()


def move_params(model: nn.Module, device: torch.device) -> None:
    """Move all shards (and buffers) between host and device."""
    reshard(model)
    model.to(device)
    _release(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's per-parameter tensors; step counters stay where the optimizer wants them."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step":
                state[key] = value.to(device)
    _release(device)


def _release(moved_to: torch.device) -> None:
    """Give what a move to the host has freed back to the device, for users other than torch's allocator (vLLM)."""
    if moved_to.type == "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()
