"""FSDP2 applied from outside: wrapping, prefetch, precision, offload. The model files know nothing of it.

Gradients are plain SUMS over ranks: losses are divided by global counts already, so FSDP's own averaging is switched
off here, in one place (`_sum_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl_like.parallel import broken_pass
from verl_like.parallel.checksum import Slice, as_matrix
from verl_like.parallel.materialize import Materializer
from verl_like.parallel.sharding import (
    build_mesh,
    build_tensor_mesh,
    fill_devices,
    local_tensor,
    named_states,
    release,
    saved_buffers,
)
from verl_like.parallel.tensor import TensorSplitter, sum_in_place

if TYPE_CHECKING:
    from verl_like.config import FSDPConfig
    from verl_like.parallel.tensor import TensorPlan
    from verl_like.parallel.ulysses import SequenceRanks


class Sharding:
    """Model sharded over the ranks by FSDP2. All methods are collective; parameter names are the unsharded model's.

    The constructor fills the model from rank 0 and shards every layer given, then the root (embedding, final norm,
    head), in place.

    Args:
        model: the model; rank 0 holds its weights, the others hold it on the meta device.
        layers: modules to shard as units, in the order of the forward pass.
        fsdp: fsdp_config.
        compute_dtype: precision in which weights are gathered; the shards keep the dtype they have.
        reduce_dtype: precision in which gradients are added up.
        buffer_dtype: precision of floating-point buffers; None keeps the model's.
        device: where the passes run.
        tensor: linear layers to split among the ranks of tensor-parallel groups. A layer is then sharded over the ranks
            that hold the same split, the root over all ranks: each rank of a group has its own part of the root's work.

    A rank alone has nobody to add up gradients with: doing it once costs no memory, unless the shards are narrower than
    the sum. On a CPU it keeps the gathered weights as well, as with reshard_after_forward=False: they are a copy, and
    copying them for every micro-batch costs several percent of a small model's update (docs/performance.md).

    root: the module to call.
    reduces_once: gradients are reduced only once per optimizer step, whatever fsdp_config.sync_every_micro_batch says.
    recovers: a pass that broke off can be forgotten (`recover`).
    gathers_the_rest, reduces_the_rest: a forward or backward pass that broke off on one of several ranks can be
    completed.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        fsdp: FSDPConfig,
        *,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        buffer_dtype: torch.dtype | None,
        device: torch.device,
        tensor: TensorPlan | None = None,
    ) -> None:
        self.root, self._device = model, device
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if fsdp.offload_policy else OffloadPolicy()
        weights = Materializer(model, *fill_devices(fsdp, device), buffer_dtype)
        self._mesh = self._layer_mesh = build_mesh(device, fsdp.fsdp_size)
        self._splitter: TensorSplitter | None = None
        if tensor is not None:
            whole = build_tensor_mesh(device, fsdp.fsdp_size, tensor.size)
            self._layer_mesh = whole[tuple(whole.mesh_dim_names or ())[:-1]]
            self._splitter = TensorSplitter(tensor, whole["tensor"])
        alone = dist.get_world_size() == 1 and not fsdp.offload_policy
        self.reduces_once = alone and all(p.dtype == reduce_dtype for p in model.parameters() if p.requires_grad)
        keep_gathered = not fsdp.reshard_after_forward or (alone and device.type == "cpu")
        shared = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype),
            "offload_policy": offload,
        }
        for layer in layers:
            weights.fill(layer)
            if self._splitter is not None:
                self._splitter.split(layer)
            fully_shard(layer, mesh=self._layer_mesh, **shared, reshard_after_forward=not keep_gathered)
        if self._splitter is not None:
            self._splitter.check_complete()
        weights.fill(model)
        fully_shard(model, mesh=self._mesh, **shared, reshard_after_forward=False)
        self._units: list[nn.Module] = [model, *layers]
        self.recovers = broken_pass.is_possible(self._units)
        self.gathers_the_rest = self.recovers and not _holds_any(layers, layers)  # the order of nested ones is another
        self.reduces_the_rest = (
            self.gathers_the_rest
            and self._layer_mesh["shard"].size() > 1  # else FSDP2 reduces between replicas alone, which is not noted
            and not _holds_any(_blocks(model), layers)  # a block that is computed again gathers its parts in between
        )
        if self.reduces_the_rest:
            broken_pass.note_reductions(self._units)
        self._reached: list[nn.Module] | None = None  # of the forward pass under way; None outside one
        for unit in self._units:  # behind FSDP's own hooks: the unit is gathered when these run
            unit.register_forward_pre_hook(self._note_reached)
        if fsdp.forward_prefetch:
            _prefetch_next(model, layers)
        if keep_gathered:  # until `reshard`: the micro-batches of an update gather once
            model.set_reshard_after_backward(False)
        _sum_gradients(model)

    def set_gradient_sync(self, enabled: bool) -> None:
        """Choose whether the next backward pass reduces gradients over the ranks or adds them up unsharded on each."""
        assert isinstance(self.root, FSDPModule)
        self.root.set_requires_gradient_sync(enabled)

    @torch.compiler.disable
    def _note_reached(self, unit: nn.Module, _: tuple[object, ...]) -> None:
        if self._reached is not None:
            self._reached.append(unit)

    def forward_begins(self) -> None:
        """Note that the root's next call is a pass of its own."""
        self._reached = []
        if self.reduces_the_rest:
            broken_pass.begin(self._units)

    def gather_the_rest(self) -> None:
        """Take part in the gathers of a forward pass that this rank has broken off and others go on with.

        Units are gathered in the order of the forward pass, each once.
        """
        reached, self._reached = self._reached or [], None
        for unit in self._units[len(reached) :]:
            assert isinstance(unit, FSDPModule)
            unit.unshard()
            unit.reshard()

    def reduce_the_rest(self, graph: list[Tensor]) -> None:
        """Take part in the gathers and reductions of a backward pass that broke off here and that others go on with.

        This rank's gradients are worthless then. graph: the loss, alone in a list, which is taken out to free its
        graph.
        """
        broken_pass.complete(self._units, graph)

    def recover(self) -> None:
        """Forget a pass that broke off on this rank, or was given up after its forward pass, and all gradients."""
        broken_pass.forget(self._units)
        self.reshard()
        broken_pass.drop_unsharded_gradients(self._units)
        self.drop_gradients()

    def reshard(self) -> None:
        """Free the gathered weights that passes leave behind; call it before an optimizer step reads the shards."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def parameters(self) -> list[nn.Parameter]:
        """Trained shards of this rank, for the optimizer."""
        return [p for p in self.root.parameters() if p.requires_grad]

    @property
    def tensor_group(self) -> SequenceRanks | None:
        """Ranks among which every layer is split (parallel/tensor.py); they need the same rows, in slices."""
        return None if self._splitter is None else self._splitter.group

    def complete_gradients(self) -> None:
        """Add up the parts that the ranks of the tensor group have of one gradient; once, after the last micro-batch.

        Weights of a layer that are not split (norms, an adapter's other half) have had the group's tokens apart, or its
        heads; FSDP has summed over the ranks of the same split alone.
        """
        if self._splitter is not None:
            partial = [p for p in self.parameters() if self._held_by(p) is self._layer_mesh and p.grad is not None]
            sum_in_place([local_tensor(p.grad) for p in partial], self._splitter.group.group, self._device)

    def _held_by(self, parameter: nn.Parameter) -> DeviceMesh | None:
        """Mesh that a parameter is sharded over: the root's, the layers', or None for a split weight (both axes)."""
        assert isinstance(parameter, DTensor)
        meshes = (self._mesh, self._layer_mesh)
        return next((mesh for mesh in meshes if parameter.device_mesh == mesh), None)

    def gradient_norm(self) -> Tensor:
        """2-norm of the whole gradient, the same on every rank."""
        if self._splitter is not None:
            return self._norm_of_parts(self._splitter.group)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _norm_of_parts(self, group: SequenceRanks) -> Tensor:
        """Norm from squares summed over the ranks that hold different parts: one sum for each kind of parameter."""
        squares = torch.zeros(3, device=self._device)  # the root's, the layers', those of split weights
        meshes = (self._mesh, self._layer_mesh, None)
        for p in self.parameters():
            if p.grad is not None:
                norm = torch.linalg.vector_norm(local_tensor(p.grad), dtype=torch.float32)
                squares[meshes.index(self._held_by(p))] += norm.square().to(self._device)
        dist.all_reduce(squares[2:], group=group.group)
        dist.all_reduce(squares[1:], group=self._layer_mesh.get_group("shard"))
        dist.all_reduce(squares[:1], group=self._mesh.get_group("shard"))
        return squares.sum().sqrt()

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full float32 gradient on the device) of every parameter that has one, for checks."""
        for name, parameter in self.root.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                yield name, self._gather(parameter, parameter.grad, torch.float32)

    def drop_gradients(self) -> None:
        """Free the gradients of all parameters."""
        for parameter in self.parameters():
            parameter.grad = None

    def full_weights(
        self, dtype: torch.dtype, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor on the device), cast to `dtype` before the gather where possible.

        Saved buffers come last, in float32. wanted: true for the names to gather; None gathers all.
        """
        for name, parameter in self.root.named_parameters():
            if wanted is None or wanted(name):
                yield name, self._gather(parameter, parameter, dtype)
        for name, buffer in saved_buffers(self.root):
            if wanted is None or wanted(name):
                yield name, buffer.to(device=self._device, dtype=torch.float32, copy=True)

    def local_slices(self) -> Iterator[tuple[str, torch.Size, Slice]]:
        """Yield (name, whole shape, this rank's part on the device) of all weights, in the precision of the shards.

        Saved buffers are the part of the first rank.

        A parameter may have several parts here, or none. Over the ranks of `sum_over_shards` every entry comes once; of
        the entries that the ranks of a tensor-parallel group hold alike, the first rank yields them. Gathers nothing.
        """
        self.reshard()
        first = self._splitter is None or self._splitter.group.rank == 0
        for name, parameter in self.root.named_parameters():
            assert isinstance(parameter, DTensor)
            with torch.no_grad():  # with gradients, torch makes two DTensors on the way
                local, starts = parameter.to_local().detach().to(self._device), [0] * parameter.ndim
            held_by = self._mesh if self._splitter is None else self._held_by(parameter)
            rows = parameter.shape[0]
            if self._splitter is not None and held_by is None:
                split = self._splitter.dimension(parameter, self._layer_mesh)
                starts[split] = parameter.shape[split] // self._splitter.group.size * self._splitter.group.rank
                rows = rows // self._splitter.group.size if split == 0 else rows
            elif held_by is self._layer_mesh and held_by is not self._mesh and not first:
                continue
            mesh = self._mesh if held_by is self._mesh else self._layer_mesh
            each = -(-rows // mesh["shard"].size())  # the last ranks may have less, or nothing
            starts[0] += min(each * mesh.get_local_rank("shard"), rows)
            if local.numel():
                yield name, parameter.shape, _placed(local, parameter.shape, starts)
        if self._mesh.get_local_rank("shard") == 0:
            for name, buffer in saved_buffers(self.root):
                yield name, buffer.shape, _placed(buffer.detach().to(self._device), buffer.shape, [0] * buffer.ndim)

    def sum_over_shards(self, numbers: Tensor) -> Tensor:
        """Add up numbers over the ranks that hold one model together; on the device."""
        dist.all_reduce(numbers := numbers.to(self._device), group=self._mesh.get_group("shard"))
        return numbers

    def _gather(self, parameter: nn.Parameter, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather `tensor` (the parameter, or its gradient) in full: over the shards first, then over the split."""
        if self._splitter is None or self._held_by(parameter) is not None:
            return gather(tensor, self._device, dtype)
        return self._splitter.joined(tensor, self._layer_mesh, self._device, dtype)

    def move_params(self, device: torch.device) -> None:
        """Move all shards (and buffers) between host and device."""
        self.reshard()
        self.root.to(device)
        release(device)

    def model_state(self) -> dict[str, Tensor]:
        """Shards by name, for a checkpoint. Reading a checkpoint into it changes the model."""
        state = {name: parameter.detach() for name, parameter in self.root.named_parameters()}
        return state | dict(saved_buffers(self.root))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """States of the optimizer by "<name>.<state>"; zero before the first step.

        Reading a checkpoint into it changes the optimizer.
        """
        return named_states(self.root.named_parameters(), optimizer)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Modules in the model's lists of modules: its layers, and maybe parts of them."""
    return [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]


def _holds_any(outer: Sequence[nn.Module], units: Sequence[nn.Module]) -> bool:
    """True where one of `units` is a part of one of `outer`."""
    parts = {id(part) for module in outer for part in module.modules() if part is not module}
    return any(id(unit) in parts for unit in units)


def _placed(local: Tensor, shape: torch.Size, starts: list[int]) -> Slice:
    """Make a slice of a part of a tensor that begins at `starts`; all axes but the first and the last must be whole."""
    if local.ndim < 2:
        return Slice(local.view(1, -1), 0, starts[0] if starts else 0)
    return Slice(as_matrix(local), starts[0] * shape[1:-1].numel(), starts[-1])


def gather(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Gather the full tensor on every rank, cast before so that only `dtype` travels (collective)."""
    alone = isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1
    local = local_tensor(tensor.detach()).to(device=device, dtype=dtype, copy=alone)
    if alone or not isinstance(tensor, DTensor):  # a gather from one rank costs what the copy does several times over
        return local
    shard = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return shard.full_tensor()


def _sum_gradients(model: nn.Module) -> None:
    # gloo has no scaled sum: a factor of 1 alone fails there, forced sum reduction makes it a plain sum on all backends
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _prefetch_next(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Gather each layer's weights while the one before it computes, asked for as soon as that one starts.

    Without the list FSDP2 asks for them when the layer itself starts, and overlaps only what the CPU has run ahead.
    """
    for module, following in pairwise([model, *layers]):
        assert isinstance(module, FSDPModule) and isinstance(following, FSDPModule)
        module.set_modules_to_forward_prefetch([following])
