"""FSDP1 (`strategy=fsdp`, torch's FullyShardedDataParallel) under the same contract as FSDP2.

Parameters keep their names and shapes of their own (use_orig_params), as slices of one flat tensor per unit. Gradients
are plain SUMS over ranks: FSDP1's divisions before and after the reduction are set to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from verl_like.parallel.checksum import Slice, run_slices
from verl_like.parallel.materialize import Materializer
from verl_like.parallel.sharding import build_mesh, fill_devices, init_state, release

if TYPE_CHECKING:
    from verl_like.config import FSDPConfig

_WRAPPER = "_fsdp_wrapped_module."  # what FSDP1 puts into parameter names


class FSDP1Sharding:
    """See `Sharding`. Building one fills the model from rank 0 and wraps every layer given, then the root.

    compute_dtype: what weights are gathered in; the shards keep the dtype they have.
    """

    reads_from_host = False
    tensor_group = None

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
    ) -> None:
        self._device = device
        mesh = build_mesh(device, fsdp.fsdp_size)
        sharded = mesh["shard"].size() > 1
        self.shard_index = mesh.get_local_rank("shard")
        self.recovers = self.gathers_the_rest = self.reduces_the_rest = False
        self.reduces_once = not sharded  # FSDP1 then reduces the accumulated gradient, earlier sums included
        self._shard_group = mesh.get_group("shard") if sharded else None
        if not sharded:  # every rank holds the whole model: FSDP1 has a strategy of its own for that, on one axis
            mesh = build_mesh(device, -1)
        weights = Materializer(model, *fill_devices(fsdp, device), buffer_dtype)
        settings: dict[str, Any] = {
            "device_mesh": mesh,
            "device_id": device,
            "use_orig_params": True,
            "mixed_precision": MixedPrecision(
                param_dtype=compute_dtype, reduce_dtype=reduce_dtype, buffer_dtype=buffer_dtype
            ),
            "forward_prefetch": fsdp.forward_prefetch,
            "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
            "limit_all_gathers": True,
        }
        inside, outside = _strategies(fsdp, sharded=sharded, replicated=mesh.ndim == 2)
        chosen = {id(layer) for layer in layers}
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if id(child) in chosen:
                    weights.fill(child)
                    setattr(parent, name, FSDP(child, sharding_strategy=inside, **settings))
        weights.fill(model)
        self.root = FSDP(model, sharding_strategy=outside, **settings)
        for module in FSDP.fsdp_modules(self.root):
            module._gradient_predivide_factor = module._gradient_postdivide_factor = 1.0

    def set_gradient_sync(self, enabled: bool) -> None:
        """See Sharding. What FSDP1's `no_sync` does, without a context to leave."""
        for module in FSDP.fsdp_modules(self.root):
            module._sync_gradients = enabled

    def forward_begins(self) -> None:
        """Nothing is noted: `recovers` is False."""

    def gather_the_rest(self) -> None:
        """See Sharding."""
        raise NotImplementedError("strategy=fsdp cannot complete a pass that broke off: use fsdp2")

    def reduce_the_rest(self, graph: list[Tensor]) -> None:
        """See Sharding."""
        raise NotImplementedError("strategy=fsdp cannot complete a pass that broke off: use fsdp2")

    def recover(self) -> None:
        """See Sharding."""
        raise NotImplementedError("strategy=fsdp cannot forget a pass that broke off: use fsdp2")

    def reshard(self) -> None:
        """See Sharding. A unit without a trained weight stays gathered after a backward pass too."""
        for module in FSDP.fsdp_modules(self.root):
            handle = module._handle
            if handle is None:
                continue
            if not handle.uses_sharded_strategy:
                handle._use_sharded_views()
            elif not handle.is_sharded(handle.flat_param):
                handle.reshard(True)
                handle.post_reshard()

    def parameters(self) -> list[nn.Parameter]:
        """See Sharding. A rank may hold none of a parameter: its slice is then empty."""
        return [p for p in self.root.parameters() if p.requires_grad]

    def complete_gradients(self) -> None:
        """See Sharding: FSDP1 splits no layer."""

    def gradient_norm(self) -> Tensor:
        """See Sharding."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        squared = torch.nn.utils.get_total_norm(gradients).float().square().to(self._device)
        if self._shard_group is not None:
            dist.all_reduce(squared, group=self._shard_group)
        return squared.sqrt()

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See Sharding."""
        for unit in FSDP.fsdp_modules(self.root):
            with FSDP.summon_full_params(unit, recurse=False, writeback=False, with_grads=True):
                for name, parameter in _own_parameters(self.root, unit):
                    if parameter.requires_grad and parameter.grad is not None:
                        yield name, parameter.grad.detach().to(device=self._device, dtype=torch.float32, copy=True)

    def drop_gradients(self) -> None:
        """See Sharding. The flat gradient, of which a parameter's is a view, would stay until the next forward pass."""
        for parameter in self.parameters():
            parameter.grad = None
        for module in FSDP.fsdp_modules(self.root):
            if module._handle is not None:
                module._handle.flat_param.grad = None

    def full_weights(
        self, dtype: torch.dtype, wanted: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """See Sharding. One unit is gathered at a time, in the precision of its shards, and cast afterwards."""
        for unit in FSDP.fsdp_modules(self.root):
            chosen = {name for name, _ in _own_parameters(self.root, unit) if wanted is None or wanted(name)}
            if not chosen:
                continue
            with FSDP.summon_full_params(unit, recurse=False, writeback=False):
                for name, parameter in _own_parameters(self.root, unit):
                    if name in chosen:
                        yield name, parameter.detach().to(device=self._device, dtype=dtype, copy=True)

    def local_slices(self) -> Iterator[tuple[str, torch.Size, Slice]]:
        """See Sharding. A rank's part of a unit is one run of its weights laid end to end."""
        self.reshard()
        for unit in FSDP.fsdp_modules(self.root):
            if unit._handle is None:
                continue
            flat, prefix = unit._handle.flat_param, next(n for n, m in self.root.named_modules() if m is unit)
            held = flat.detach().to(self._device)
            for name, shape, part in zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True):
                if not part.in_shard or part.numel_in_shard == 0:
                    continue
                run = held[part.offset_in_shard : part.offset_in_shard + part.numel_in_shard]
                whole = f"{prefix}.{name}".replace(_WRAPPER, "").removeprefix(".")
                for piece in run_slices(
                    run, part.intra_param_start_idx, shape[-1] if len(shape) > 1 else shape.numel()
                ):
                    yield whole, shape, piece

    def sum_over_shards(self, numbers: Tensor) -> Tensor:
        """See Sharding."""
        numbers = numbers.to(self._device)
        if self._shard_group is not None:
            dist.all_reduce(numbers, group=self._shard_group)
        return numbers

    def move_params(self, device: torch.device) -> None:
        """See Sharding."""
        self.reshard()
        for module in FSDP.fsdp_modules(self.root):
            handle = module._handle
            if handle is not None:
                handle.flat_param_to(device, non_blocking=False)
                handle.flat_param._local_shard = handle.flat_param.data
                handle._use_sharded_views()
        for buffer in self.root.buffers():
            buffer.data = buffer.data.to(device)
        release(device)

    def model_state(self) -> dict[str, Tensor]:
        """See Sharding. A tied weight has its first name alone, as under FSDP2."""
        first = self._first_names()
        return {name: tensor for name, tensor in get_model_state_dict(self.root).items() if first[name] == name}

    def set_model_state(self, state: dict[str, Tensor]) -> None:
        """See Sharding."""
        first, whole = self._first_names(), get_model_state_dict(self.root)  # it takes nothing less than all
        set_model_state_dict(self.root, {name: state.get(first[name], tensor) for name, tensor in whole.items()})

    def _first_names(self) -> dict[str, str]:
        """{name in the state dict: the first name of the same tensor}."""
        owners: dict[int, str] = {}
        tensors = [*self.root.named_parameters(remove_duplicate=False), *self.root.named_buffers()]
        names = ((name.replace(_WRAPPER, ""), id(tensor)) for name, tensor in tensors)
        return {name: owners.setdefault(tensor, name) for name, tensor in names}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """See Sharding."""
        for parameter in self.parameters():
            if not optimizer.state[parameter]:
                init_state(optimizer, parameter, optimizer.state[parameter])
        states = get_optimizer_state_dict(self.root, optimizer)["state"]
        return {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}

    def set_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
        """See Sharding."""
        whole = get_optimizer_state_dict(self.root, optimizer)
        for key, value in state.items():
            name, _, part = key.rpartition(".")
            whole["state"][name][part] = value
        kinds = {p: {key: value.dtype for key, value in own.items()} for p, own in optimizer.state.items()}
        set_optimizer_state_dict(self.root, optimizer, whole)
        for parameter, own in optimizer.state.items():  # torch has cast them to the parameter's precision
            own.update({key: value.to(kinds[parameter][key]) for key, value in own.items()})


def _strategies(fsdp: FSDPConfig, *, sharded: bool, replicated: bool) -> tuple[ShardingStrategy, ShardingStrategy]:
    """(of the layers, of the root). The root keeps its weights between forward and backward, as FSDP2's does."""
    if not sharded:
        return ShardingStrategy.NO_SHARD, ShardingStrategy.NO_SHARD
    keep = ShardingStrategy._HYBRID_SHARD_ZERO2 if replicated else ShardingStrategy.SHARD_GRAD_OP
    free = ShardingStrategy.HYBRID_SHARD if replicated else ShardingStrategy.FULL_SHARD
    return (free if fsdp.reshard_after_forward else keep), keep


def _own_parameters(root: nn.Module, unit: FSDP) -> Iterator[tuple[str, nn.Parameter]]:
    """(clean name, parameter) of those that this unit, and no unit inside it, holds."""
    prefix = next(name for name, module in root.named_modules() if module is unit)
    inner = [name for name, module in unit.named_modules() if isinstance(module, FSDP) and module is not unit]
    for name, parameter in unit._fsdp_wrapped_module.named_parameters():
        full = f"{_WRAPPER}{name}"
        if not any(full.startswith(f"{other}.") for other in inner):
            yield f"{prefix}.{full}".replace(_WRAPPER, "").removeprefix("."), parameter
