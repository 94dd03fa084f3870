"""FSDP2 applied from outside: wrapping, prefetch, precision, offload. The model files know nothing of it.

Gradients are plain SUMS over ranks: losses are divided by global counts already, so FSDP's own averaging is switched
off here, in one place (`_sum_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from verl_like.parallel.experts import spread_experts
from verl_like.parallel.late_gradients import LateGradients
from verl_like.parallel.materialize import Materializer
from verl_like.parallel.mesh import ParallelMesh, SplitAxis
from verl_like.parallel.pipeline import Stage
from verl_like.parallel.sharding import fill_devices, local_tensor, named_states, release, saved_buffers
from verl_like.parallel.tensor import TensorSplitter, sum_in_place

if TYPE_CHECKING:
    from verl_like.config import FSDPConfig
    from verl_like.parallel.tensor import TensorPlan


class Sharding:
    """Model sharded over the ranks by FSDP2. All methods are collective; parameter names are the unsharded model's.

    The constructor fills the model from rank 0 and shards every layer given, then the root (embedding, final norm,
    head), in place.

    Args:
        model: the model; rank 0 holds its weights, the others hold it on the meta device.
        layers: modules to shard as units, in the order of the forward pass.
        fsdp: fsdp_config.
        mesh: the ranks.
        compute_dtype: precision in which weights are gathered; the shards keep the dtype they have.
        reduce_dtype: precision in which gradients are added up.
        buffer_dtype: precision of floating-point buffers; None keeps the model's.
        device: where the passes run.
        tensor: linear layers to split among the ranks of tensor-parallel groups. A layer is then sharded over the ranks
            that hold the same split, the root over all ranks: each rank of a group has its own part of the root's work.
        experts: modules of stacked experts, where the mesh has an axis of them or of `tensor`: units of their own
            beside `layers`, handed out along the one, sharded over all ranks of the other, of which each has tokens.
        stages: the places that hold a part of the model (`pipeline.Stage`), where the mesh has an axis of them. A rank
            gets the other stages' parts too, one unit at a time, and lets go of them before they are sharded.

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
        mesh: ParallelMesh,
        *,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        buffer_dtype: torch.dtype | None,
        device: torch.device,
        tensor: TensorPlan | None = None,
        experts: Sequence[nn.Module] = (),
        stages: Mapping[str, frozenset[int]] | None = None,
    ) -> None:
        self.root, self._device, self.mesh = model, device, mesh
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if fsdp.offload_policy else OffloadPolicy()
        weights = Materializer(model, *fill_devices(fsdp, device), buffer_dtype)
        splitter = None if tensor is None or mesh.tensor is None else TensorSplitter(tensor, mesh.tensor)
        alone = mesh.sizes.world == 1 and not fsdp.offload_policy
        self.reduces_once = alone and all(p.dtype == reduce_dtype for p in model.parameters() if p.requires_grad)
        keep_gathered = not fsdp.reshard_after_forward or (alone and device.type == "cpu")
        shared = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype),
            "offload_policy": offload,
        }
        self._stage = None if mesh.pipe is None else Stage(model, stages or {}, mesh.pipe)
        own_units, held = set(experts), set[nn.Module]()
        layers = [layer for layer in layers if layer not in own_units]
        self._of_experts = {f"{n}.{w}" for n, m in model.named_modules() if m in own_units for w in m._parameters}
        for unit in sorted([*layers, *experts], key=_num_modules):  # inner before outer
            weights.fill(unit, mesh.expert if unit in own_units else None)
            if splitter is not None and unit not in own_units:
                splitter.split(unit)
            if self._stage is not None and self._stage.drop(unit):
                continue
            held.add(unit)
            if unit in own_units:
                if mesh.expert is not None:
                    spread_experts(unit, mesh.expert.group)
                # Inputs stay as they are: a router's float32 weights of the chosen experts are among them.
                policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False)
                options = {**shared, "mp_policy": policy, "reshard_after_forward": not keep_gathered}
                fully_shard(unit, mesh=mesh.root if mesh.expert is None else mesh.expert.shards, **options)
                continue
            fully_shard(unit, mesh=mesh.layers, **shared, reshard_after_forward=not keep_gathered)
        if splitter is not None:
            splitter.check_complete()
        weights.fill(model)
        if self._stage is not None:
            self._stage.drop_the_rest()
        fully_shard(model, mesh=mesh.root, **shared, reshard_after_forward=False)
        layers, experts = ([unit for unit in units if unit in held] for units in (layers, experts))
        self._units: list[nn.Module] = [model, *layers, *experts]
        self.recovers = self._stage is None and broken_pass.is_possible(self._units)
        in_order = not experts and not _holds_any(layers, self._units)  # that of nested ones is another
        self.gathers_the_rest = self.recovers and in_order
        self.reduces_the_rest = (
            self.gathers_the_rest
            and mesh.layers["shard"].size() > 1  # else FSDP2 reduces between replicas alone, which is not noted
            and not _holds_any(_blocks(model), layers)  # a block that is computed again gathers its parts in between
        )
        if self.reduces_the_rest:
            broken_pass.note_reductions(self._units)
        self._reached: list[nn.Module] | None = None  # of the forward pass under way; None outside one
        for unit in self._units:  # behind FSDP's own hooks: the unit is gathered when these run
            unit.register_forward_pre_hook(self._note_reached)
        if fsdp.forward_prefetch:
            stage = self._stage if mesh.sizes.virtual > 1 else None
            for units in [[model, *layers]] if stage is None else stage.runs(layers):
                _prefetch_next(units)
        if keep_gathered:  # until `reshard`: the micro-batches of an update gather once
            model.set_reshard_after_backward(False)
        _sum_gradients(model)
        self._late: LateGradients | None = None
        if self._stage is not None and fsdp.pipeline_schedule == "zero_bubble":
            self._late = LateGradients(layers, reduce_dtype)

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

    def trained_dtypes(self) -> set[torch.dtype]:
        """Precisions of the trained shards, those of all stages: one of them may train nothing (collective)."""
        own = {p.dtype for p in self.parameters()}
        return own if self._stage is None else self._stage.anywhere(own)

    def backward_begins(self) -> None:
        """Note that the next backward pass of a stage begins, of which `weights_pass` may be called later."""
        if self._late is not None:
            self._late.begin()

    def weights_pass(self) -> None:
        """Compute the gradients of the weights in layers for the oldest backward pass of this stage without them."""
        assert self._late is not None, "fsdp_config.pipeline_schedule=zero_bubble has such passes"
        self._late.weights_pass()

    def complete_gradients(self) -> None:
        """Add up the parts that the ranks of the tensor group have of one gradient; once, after the last micro-batch.

        Weights of a layer that are not split (norms, an adapter's other half) have had the group's tokens apart, or its
        heads; FSDP has summed over the ranks of the same split alone.
        """
        axis = self.mesh.tensor
        if self._late is not None:
            self._late.reduce()
        if axis is not None:
            partial = [p for p in self.parameters() if self._is_whole_in_layer(p) and p.grad is not None]
            sum_in_place([local_tensor(p.grad) for p in partial], axis.group.group, self._device)
        if self._stage is not None:  # a tied weight: the embedding's part of the gradient, and the head's
            named = [(n, p.grad) for n, p in self.root.named_parameters() if self._stage.is_shared(n)]
            shared = [local_tensor(gradient) for _, gradient in named if gradient is not None]
            sum_in_place(shared, self._stage.pipe.ends, self._device)

    def _is_whole_in_layer(self, parameter: nn.Parameter) -> bool:
        """True for a weight of a layer that the ranks of the tensor group hold alike."""
        mesh = self.mesh
        return mesh.split_of(parameter) is None and mesh.sharded_over(parameter) is not mesh.root

    def gradient_norm(self) -> Tensor:
        """2-norm of the whole gradient, the same on every rank."""
        stage = self._stage
        counted = [p for n, p in self.root.named_parameters() if stage is None or stage.counts(n)]
        if self.mesh.tensor is not None or self.mesh.expert is not None:
            norm = self._norm_of_parts(counted)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in counted if p.grad is not None])
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if stage is None:
            return norm
        square = norm.to(self._device).double().square()
        dist.all_reduce(square, group=stage.pipe.group)
        return square.sqrt().float()

    def _norm_of_parts(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Norm from squares summed over the ranks that hold different parts: one sum for each kind of parameter."""
        axes = (self.mesh.tensor, self.mesh.expert)
        kinds: list[tuple[SplitAxis | None, DeviceMesh]] = [(axis, axis.shards) for axis in axes if axis is not None]
        kinds += [(None, mesh) for mesh in {id(each): each for each in (self.mesh.layers, self.mesh.root)}.values()]
        squares = torch.zeros(len(kinds), device=self._device, dtype=torch.float64)
        for p in parameters:
            if p.grad is not None:
                kind = (self.mesh.split_of(p), self.mesh.sharded_over(p))
                wide = torch.promote_types(p.grad.dtype, torch.float32)
                norm = torch.linalg.vector_norm(local_tensor(p.grad), dtype=wide)
                squares[kinds.index(kind)] += norm.double().square().to(self._device)
        for index, (axis, shards) in enumerate(kinds):
            dist.all_reduce(squares[index], group=shards.get_group("shard"))
            if axis is not None:
                dist.all_reduce(squares[index], group=axis.group.group)
        return squares.sum().sqrt().float()

    def full_gradients(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full gradient on the device) of every parameter that has one, for checks."""
        own = {n: (p, p.grad) for n, p in self.root.named_parameters() if p.requires_grad and p.grad is not None}
        if self._stage is not None:
            names = self._stage.anywhere(own)
            yield from ((name, tensor) for name, _, tensor in self._from_stages(own, names, dtype, lambda _: False))
            return
        for name, (parameter, gradient) in own.items():
            yield name, self._gather(parameter, gradient, dtype)

    def _from_stages(
        self,
        own: Mapping[str, tuple[nn.Parameter, Tensor]],
        names: Collection[str],
        dtype: torch.dtype,
        in_parts: Callable[[str], bool],
    ) -> Iterator[tuple[str, int, Tensor]]:
        """Yield each stage's weights (or their gradients) on all ranks, from their holders, as `weights_in_parts` does.

        Beside its own stage's shards a rank has one tensor of another stage at a time.
        """
        assert self._stage is not None
        for name, shape, holder in self._stage.weights:
            if name not in names:
                continue
            axis = self._sent_in_parts(name, in_parts)
            parts = self._parts(*own[name], dtype, axis) if self._stage.counts(name) else iter(())
            first, like = 0, {"dtype": dtype, "device": self._device}
            for rows in [shape[0]] if axis is None else axis.sent_rows(shape, dtype):
                part = torch.Size((rows, *shape[1:]))
                yield name, first, self._stage.from_holder(next(parts, None), part, holder, **like)
                first += rows

    def _sent_in_parts(self, name: str, in_parts: Callable[[str], bool]) -> SplitAxis | None:
        """Axis whose ranks send their parts of a weight one by one; None where it is gathered."""
        return self.mesh.expert if name in self._of_experts and in_parts(name) else None

    def _parts(
        self, parameter: nn.Parameter, tensor: Tensor, dtype: torch.dtype, axis: SplitAxis | None
    ) -> Iterator[Tensor]:
        if axis is None:
            yield self._gather(parameter, tensor, dtype)
        else:
            yield from axis.parts(tensor, self._device, dtype)

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
        parts = self.weights_in_parts(dtype, wanted or (lambda _: True), lambda _: False)
        return ((name, tensor) for name, _, tensor in parts)

    def weights_in_parts(
        self, dtype: torch.dtype, wanted: Callable[[str], bool], in_parts: Callable[[str], bool]
    ) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (name, first row, tensor) as `full_weights` does, but experts that are spread owner by owner.

        in_parts: true for the names of which no rank is to hold more than two owners' parts; others come whole.
        """
        buffers = dict(saved_buffers(self.root))
        if self._stage is not None:
            own, stage = {n: (p, p) for n, p in self.root.named_parameters()}, self._stage
            yield from self._from_stages(own, {n for n, _, _ in stage.weights if wanted(n)}, dtype, in_parts)
            for name, shape, holder in (each for each in stage.buffers if wanted(each[0])):
                like = {"dtype": torch.float32, "device": self._device}
                mine = buffers[name].to(**like, copy=True) if name in buffers else None
                yield name, 0, stage.from_holder(mine, shape, holder, **like)
            return
        for name, parameter in self.root.named_parameters():
            if not wanted(name):
                continue
            first = 0
            for part in self._parts(parameter, parameter, dtype, self._sent_in_parts(name, in_parts)):
                rows = part.shape[0]
                yield name, first, part
                del part  # before the next is gathered
                first += rows
        for name, buffer in buffers.items():
            if wanted(name):
                yield name, 0, buffer.to(device=self._device, dtype=torch.float32, copy=True)

    def local_slices(self) -> Iterator[tuple[str, torch.Size, Slice]]:
        """Yield (name, whole shape, this rank's part on the device) of all weights, in the precision of the shards.

        Saved buffers are the part of the first rank.

        A parameter may have several parts here, or none. Over the ranks of `sum_over_shards` every entry comes once; of
        the entries that the ranks of a tensor-parallel group hold alike, the first rank yields them. Gathers nothing.
        """
        self.reshard()
        first = self.mesh.tensor is None or self.mesh.tensor.group.rank == 0
        for name, parameter in self.root.named_parameters():
            assert isinstance(parameter, DTensor)
            if self._stage is not None and not self._stage.counts(name):
                continue
            with torch.no_grad():  # with gradients, torch makes two DTensors on the way
                local, starts = parameter.to_local().detach().to(self._device), [0] * parameter.ndim
            rows, axis = parameter.shape[0], self.mesh.split_of(parameter)
            if axis is not None:
                split = axis.dimension(parameter)
                starts[split] = parameter.shape[split] // axis.group.size * axis.group.rank
                rows = rows // axis.group.size if split == 0 else rows
            elif not first and self._is_whole_in_layer(parameter):
                continue
            mesh = self.mesh.sharded_over(parameter)
            each = -(-rows // mesh["shard"].size())  # the last ranks may have less, or nothing
            starts[0] += min(each * mesh.get_local_rank("shard"), rows)
            if local.numel():
                yield name, parameter.shape, _placed(local, parameter.shape, starts)
        if self.mesh.root.get_local_rank("shard") == 0:
            for name, buffer in saved_buffers(self.root):
                yield name, buffer.shape, _placed(buffer.detach().to(self._device), buffer.shape, [0] * buffer.ndim)

    def sum_over_shards(self, numbers: Tensor) -> Tensor:
        """Add up numbers over the ranks that hold one model together; on the device."""
        dist.all_reduce(numbers := numbers.to(self._device), group=self.mesh.group_of_copy())
        if self._stage is not None:
            dist.all_reduce(numbers, group=self._stage.pipe.group)
        return numbers

    def _gather(self, parameter: nn.Parameter, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather `tensor` (the parameter, or its gradient) in full: over the shards first, then over the split."""
        axis = self.mesh.split_of(parameter)
        return gather(tensor, self._device, dtype) if axis is None else axis.joined(tensor, self._device, dtype)

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


def _num_modules(unit: nn.Module) -> int:
    """Count the modules of a unit: more than in any other unit within it."""
    return sum(1 for _ in unit.modules())


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


def _prefetch_next(units: Sequence[nn.Module]) -> None:
    """Gather each layer's weights while the one before it computes, asked for as soon as that one starts.

    Without the list FSDP2 asks for them when the layer itself starts, and overlaps only what the CPU has run ahead.
    """
    for module, following in pairwise(units):
        assert isinstance(module, FSDPModule) and isinstance(following, FSDPModule)
        module.set_modules_to_forward_prefetch([following])
