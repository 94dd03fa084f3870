"""How one model is spread over the ranks: what FSDP2 (parallel/fsdp.py) and FSDP1 (parallel/fsdp1.py) both offer.

Gradients are plain SUMS over ranks: losses are divided by global counts already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from verl_like.parallel.checksum import Slice

if TYPE_CHECKING:
    from verl_like.config import FSDPConfig
    from verl_like.parallel.ulysses import SequenceGroup


class Sharding(Protocol):
    """One sharded model. All methods are collective. Parameter names are the unsharded model's."""

    root: nn.Module
    """The module to call."""
    shard_index: int
    """Which shard this rank holds; the same on all replicas of it."""
    reduces_once: bool
    """Gradients are reduced only once per optimizer step, whatever fsdp_config.sync_every_micro_batch says."""
    reads_from_host: bool
    """Weights can be gathered and states read while `move_params` has them in host memory."""

    recovers: bool
    """A pass that broke off can be forgotten (`recover`)."""
    gathers_the_rest: bool
    """A forward pass that broke off on one of several ranks can be completed (`gather_the_rest`)."""
    reduces_the_rest: bool
    """A backward pass that broke off on one of several ranks can be completed (`reduce_the_rest`)."""

    def forward_begins(self) -> None:
        """The root's next call is a pass of its own."""
        ...

    def gather_the_rest(self) -> None:
        """Take part in the gathers of a forward pass that this rank has broken off and others go on with."""
        ...

    def reduce_the_rest(self, graph: list[Tensor]) -> None:
        """Take part in the gathers and reductions of a backward pass that this rank has broken off and others go on
        with; its gradients are worthless then. graph: the loss, which is taken out to free what it came from."""
        ...

    def recover(self) -> None:
        """Forget a pass that broke off on this rank, or was given up after its forward pass, and all gradients."""
        ...

    @property
    def tensor_group(self) -> SequenceGroup | None:
        """The ranks among which every layer is split (parallel/tensor.py); they need the same rows, in slices."""
        ...

    def set_gradient_sync(self, enabled: bool) -> None:
        """Whether the next backward pass reduces gradients over the ranks or adds them up unsharded on each."""
        ...

    def reshard(self) -> None:
        """Free the gathered weights that passes leave behind; before an optimizer step reads the shards."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """This rank's shards that are trained: what the optimizer gets."""
        ...

    def complete_gradients(self) -> None:
        """Add up what the ranks of the tensor group have of one gradient; once, after the last micro-batch."""
        ...

    def gradient_norm(self) -> Tensor:
        """2-norm of the whole gradient, the same on every rank."""
        ...

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full float32 gradient on the device) of every parameter that has one, for checks."""
        ...

    def drop_gradients(self) -> None:
        """Free the gradients of all parameters."""
        ...

    def full_weights(
        self, dtype: torch.dtype, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor on the device), one after the other, cast to `dtype` before the gather where possible.

        wanted: of these names alone; nothing else is gathered.
        """
        ...

    def local_slices(self) -> Iterator[tuple[str, torch.Size, Slice]]:
        """(name, whole shape, this rank's part on the device) of every parameter, in the precision of the shards; maybe
        several parts, or none. Over the ranks of `sum_over_shards` every entry comes once. Gathers nothing."""
        ...

    def sum_over_shards(self, numbers: Tensor) -> Tensor:
        """Added up over the ranks that hold one model together; on the device."""
        ...

    def move_params(self, device: torch.device) -> None:
        """Move all shards (and buffers) between host and device."""
        ...

    def model_state(self) -> dict[str, Tensor]:
        """Shards by name, for a checkpoint."""
        ...

    def set_model_state(self, state: dict[str, Tensor]) -> None:
        """Take back what `model_state` gave, after a checkpoint was read into it."""
        ...

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """States by "<name>.<state>"; zero before the first step."""
        ...

    def set_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
        """Take back what `optimizer_state` gave, after a checkpoint was read into it."""
        ...


def build_mesh(device: torch.device, fsdp_size: int) -> DeviceMesh:
    """One axis over all ranks; with 0 < fsdp_size < world size two axes: replicate between groups, shard inside."""
    world = dist.get_world_size()
    if fsdp_size <= 0 or fsdp_size >= world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    if world % fsdp_size:
        raise ValueError(f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world} ranks")
    return init_device_mesh(device.type, (world // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))


def build_tensor_mesh(device: torch.device, fsdp_size: int, size: int) -> DeviceMesh:
    """As `build_mesh`, with one more axis: "tensor", of `size` neighbouring ranks, which are among the fsdp_size."""
    key, world = "fsdp_config.tensor_parallel_size", dist.get_world_size()
    if world % size:
        raise ValueError(f"{key}={size} does not divide the {world} ranks")
    if fsdp_size <= 0 or fsdp_size >= world:
        return init_device_mesh(device.type, (world // size, size), mesh_dim_names=("shard", "tensor"))
    if world % fsdp_size or fsdp_size % size:
        raise ValueError(f"fsdp_config.fsdp_size={fsdp_size} does not divide {world} ranks into groups of {key}={size}")
    shape = (world // fsdp_size, fsdp_size // size, size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard", "tensor"))


def fill_devices(fsdp: FSDPConfig, device: torch.device) -> tuple[torch.device, torch.device]:
    """(where shards live, where buffers live)."""
    return (torch.device("cpu") if fsdp.offload_policy else device), device


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard (a view), or the tensor itself when it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_index(tensor: Tensor) -> int | None:
    """Which part of the whole this rank holds, the same on all replicas of it; None for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return None
    index, position = 0, tensor.device_mesh.get_coordinate() or []
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            index = index * tensor.device_mesh.size(axis) + position[axis]
    return index


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
    """Optimizer states by "<parameter>.<state>", the optimizer's own tensors; zero before the first step."""
    flat: dict[str, Tensor] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            state = optimizer.state[parameter]
            if not state:
                init_state(optimizer, parameter, state)
            flat |= {f"{name}.{key}": value for key, value in state.items()}
    return {key: value.detach() for key, value in flat.items()}


def init_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: dict[str, Tensor]) -> None:
    """The state of a parameter that was never stepped, as the optimizer makes it at its first step."""
    if isinstance(optimizer, MakesState):
        optimizer.init_state(parameter, state)
        return
    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)  # torch's AdamW
    state["exp_avg"] = torch.zeros_like(parameter)
    state["exp_avg_sq"] = torch.zeros_like(parameter)


@runtime_checkable
class MakesState(Protocol):
    """An optimizer that knows the precision of its own states (engine/lean_optim.py)."""

    def init_state(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> None: ...


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's per-parameter tensors; step counters stay where the optimizer wants them."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step":
                state[key] = value.to(device)
    release(device)


def release(moved_to: torch.device) -> None:
    """Give what a move to the host has freed back to the device, for users other than torch's allocator (vLLM)."""
    if moved_to.type == "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()


def sized_units(module: nn.Module, min_num_params: int, keep_out: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules to shard as units of at least so many parameters each, inner ones first, without `keep_out`.

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
