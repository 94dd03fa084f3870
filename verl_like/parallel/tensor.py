"""Tensor parallelism: the ranks of a group hold a slice of each layer's matrices, and of the tokens between layers.

Inside attention and the MLP every rank sees all tokens and computes its own heads or columns; before, between and after
them it sees T / n tokens. So a block gathers the tokens where it begins, and sums the ranks' parts where it ends, each
rank keeping its own tokens. Sources: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3 (columns, then rows);
Korthikanti et al., Reducing Activation Recomputation (arXiv 2205.05198), section 4.2.2 (slices of the tokens).

Everything here keeps one rule. A tensor that is a slice (of tokens, heads or columns) has its whole gradient on its
rank; one that all ranks of the group hold has only a part of it, and the parts add up. So gradients of split weights
are complete, and those of all other weights are to be summed over the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from verl_like.parallel.context import all_gather, reduce_scatter
from verl_like.parallel.mesh import SplitAxis
from verl_like.parallel.sharding import local_tensor
from verl_like.parallel.ulysses import SequenceRanks

Style = Literal["column", "row", "column_gathered", "column_copied", "row_from_whole"]
"""column: each rank has some outputs; row: some inputs. column_gathered: all ranks get all outputs; row_from_whole: the
input is whole and each rank takes its part."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPlan:
    """Plan of the split of one model, by module.

    size: number of ranks in a group.
    linears: linear layers and how each is split.
    gathered: the modules around them, at whose entrance the tokens are gathered.
    """

    size: int
    linears: Mapping[nn.Linear, Style]
    gathered: frozenset[nn.Module]


class TensorSplitter:
    """Splitter of modules in place, before they are sharded over the data-parallel ranks. Not collective.

    axis: the ranks of the group.
    """

    def __init__(self, plan: TensorPlan, axis: SplitAxis) -> None:
        self._plan, self._axis, self.group = plan, axis, axis.group
        self._done: set[nn.Module] = set()

    def split(self, module: nn.Module) -> None:
        """Split the layers of `module` that the plan names; its weights are whole on every rank."""
        for part in set(module.modules()) - self._done:
            self._done.add(part)
            if part in self._plan.gathered:
                part.register_forward_pre_hook(partial(_gather_input, self.group), with_kwargs=True)
            if isinstance(part, nn.Linear) and part in self._plan.linears:
                self._split_linear(part, self._plan.linears[part])

    def check_complete(self) -> None:
        """Check that every part of the plan was given to `split`; raises ValueError otherwise."""
        missed = (set(self._plan.linears) | self._plan.gathered) - self._done
        if missed:
            raise ValueError(
                f"fsdp_config.tensor_parallel_size={self._plan.size}: fsdp_config.wrap_policy leaves {len(missed)} of "
                "the modules to be split outside its units; leave wrap_policy out"
            )

    def _split_linear(self, linear: nn.Module, style: Style) -> None:
        by_rows = style.startswith("column")  # a weight is [outputs, inputs]
        self._split_weight(linear, "weight", 0 if by_rows else 1)
        if by_rows and linear.bias is not None:
            self._split_weight(linear, "bias", 0)
        adapter = dict(linear.named_children())  # LoRA: B has the outputs, A the inputs
        if adapter:
            self._split_weight(adapter["lora_B" if by_rows else "lora_A"], "weight", 0 if by_rows else 1)
        linear.forward = partial(_FORWARDS[style], self.group, linear)

    def _split_weight(self, module: nn.Module, name: str, dim: int) -> None:
        whole = module._parameters[name]
        assert whole is not None
        module._parameters[name] = self._axis.split(whole, dim, requires_grad=whole.requires_grad)


def sum_in_place(tensors: Iterable[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Add up each tensor over the group (float32 or wider, on the device), many of them in one message."""
    bundle: list[Tensor] = []
    for tensor in tensors:
        bundle.append(tensor)
        if sum(part.numel() for part in bundle) >= _MESSAGE:
            _sum_bundle(bundle, group, device)
            bundle = []
    if bundle:
        _sum_bundle(bundle, group, device)


_MESSAGE = 2**24  # elements: norms of all layers in one, large weights one by one


def _sum_bundle(tensors: list[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    wide = torch.promote_types(torch.float32, tensors[0].dtype)
    flat = torch.cat([tensor.reshape(-1).to(device=device, dtype=wide) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


# --- forward passes of split linear layers ---------------------------------------------------------------------------


def _product(linear: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """Compute this rank's part of W x + b, an adapter's part included."""
    y = functional.linear(x, local_tensor(linear.weight), bias)
    if dict(linear.named_children()) and linear.enabled:
        low = functional.linear(x, local_tensor(linear.lora_A.weight))
        y = y + functional.linear(low, local_tensor(linear.lora_B.weight)) * linear.scale
    return y


def _column(_: SequenceRanks, linear: nn.Module, input: Tensor) -> Tensor:
    return _product(linear, input, None if linear.bias is None else local_tensor(linear.bias))


def _column_gathered(group: SequenceRanks, linear: nn.Module, input: Tensor) -> Tensor:
    return _Gather.apply(_column(group, linear, input), group, -1)


def _column_copied(group: SequenceRanks, linear: nn.Module, input: Tensor) -> Tensor:
    """Gather the columns into a tensor that may be changed in place: no view."""
    return _column_gathered(group, linear, input).clone()


def _row(group: SequenceRanks, linear: nn.Module, input: Tensor) -> Tensor:
    """Sum the ranks' parts; each rank keeps its tokens, and adds the bias to them."""
    y = _SumParts.apply(_product(linear, input, None), group)
    return y if linear.bias is None else y + linear.bias


def _row_from_whole(group: SequenceRanks, linear: nn.Module, input: Tensor) -> Tensor:
    return _row(group, linear, input.chunk(group.size, dim=-1)[group.rank])


_FORWARDS: dict[Style, Callable[[SequenceRanks, nn.Module, Tensor], Tensor]] = {
    "column": _column,
    "column_gathered": _column_gathered,
    "column_copied": _column_copied,
    "row": _row,
    "row_from_whole": _row_from_whole,
}


def _gather_input(
    group: SequenceRanks, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gather the hidden states of all tokens for a module that was called with this rank's, its first argument."""
    if args:
        return (_Gather.apply(args[0], group, -2), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": _Gather.apply(kwargs["hidden_states"], group, -2)}


class _Gather(torch.autograd.Function):
    """Slices of the ranks side by side; the gradient of a slice is the sum of the parts that the ranks have of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceRanks, dim: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.dim = group, dim
        return _gathered(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _summed_slice(grad, ctx.group, ctx.dim), None, None


class _SumParts(torch.autograd.Function):
    """Sum of the ranks' parts, of which each rank keeps its slice of the tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceRanks) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return _summed_slice(x, group, -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gathered(grad, ctx.group, -2), None


def _gathered(x: Tensor, group: SequenceRanks, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    whole = front.new_empty((group.size * front.shape[0], *front.shape[1:]))
    all_gather(whole, front, group=group.group)
    return whole.movedim(0, dim)


def _summed_slice(x: Tensor, group: SequenceRanks, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    mine = front.new_empty((front.shape[0] // group.size, *front.shape[1:]))
    reduce_scatter(mine, front, group=group.group)
    return mine.movedim(0, dim)
