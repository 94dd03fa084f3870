"""Kernels on the twin, as shapes alone: flash-attn, which need not be installed, Liger's, one of torch's CUDA build.

And loads of experts, which are values.

Their autograd functions keep what the real ones keep for the backward pass, so that memory is counted right. Sources:
flash_attn/flash_attn_interface.py (FlashAttnVarlenFunc), liger_kernel/ops/{rms_norm,rope,swiglu}.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("twin", "DEF")
_library.define("varlen_forward(Tensor q, Tensor k, Tensor v, Tensor own, Tensor bounds) -> (Tensor, Tensor)")
_library.define("varlen_backward(Tensor d, Tensor q, Tensor k, Tensor v, Tensor own, Tensor bounds) -> Tensor[]")
_library.define("like(Tensor[] inputs) -> Tensor[]")
_library.impl("varlen_forward", lambda q, k, v, own, bounds: (torch.empty_like(q), _normaliser(q)), "Meta")
_library.impl("varlen_backward", lambda d, *qkv: [torch.empty_like(x) for x in qkv[:3]], "Meta")
_library.impl("like", lambda inputs: [torch.empty_like(x) for x in inputs], "Meta")
_ops = torch.ops.twin
# One kernel where there is one for the device. torch's CPU build has none for CUDA, and would take it apart into seven
# operators with as many results, which a card never holds.
_of_torch = torch.library.Library("aten", "IMPL")
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::silu_backward", "CUDA"):
    _of_torch.impl("silu_backward", lambda grad, gate: torch.empty_like(gate), "CUDA")


def _normaliser(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own: Tensor, bounds: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out, normaliser = _ops.varlen_forward(q, k, v, own, bounds)
        ctx.save_for_backward(q, k, v, own, bounds, out, normaliser)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (*_ops.varlen_backward(grad, *ctx.saved_tensors[:5]), None, None)


class _Kernel(torch.autograd.Function):
    """One kernel forward, one backward. kept: number of inputs that are saved; out: of inputs that have a result."""

    @staticmethod
    def forward(ctx: Any, kept: int, outputs: int, numbers: int, *inputs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = inputs[0].shape[:-1]
        more = [inputs[0].new_empty(rows, dtype=torch.float32)] * numbers  # a number for each row of a norm
        ctx.save_for_backward(*inputs[:kept], *more)
        ctx.inputs = [(x.shape, x.dtype, x.device) for x in inputs]
        return tuple(_ops.like(list(inputs[:outputs])))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        given = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.inputs]
        return (None, None, None, *_ops.like(given))


def flash_attention() -> None:
    """Make `flash_attn` a module of this process, version 2."""

    def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return _Varlen.apply(q, k, v, options["cu_seqlens_q"], options["cu_seqlens_k"])

    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None, origin="the twin")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    sys.modules["flash_attn"] = module


def liger() -> None:
    """Put shapes in place of Liger's kernels, whose launcher asks for the driver of a card."""
    from liger_kernel.transformers import functional

    def kernel(kept: int, outputs: int, numbers: int, count: int) -> Callable[..., Any]:
        def call(*inputs: Any, **_: Any) -> Any:
            results = _Kernel.apply(kept, outputs, numbers, *inputs[:count])
            return results[0] if outputs == 1 else results

        return call

    functional.liger_rms_norm = kernel(2, 1, 1, 2)  # x, weight
    functional.liger_swiglu = kernel(2, 1, 0, 2)  # gate, up
    functional.liger_geglu = kernel(2, 1, 0, 2)
    functional.liger_rope = kernel(0, 2, 0, 2)  # q, k, rotated in place: cos and sin are kept, which others hold anyway


def even_loads() -> None:
    """Let each rank of an expert group send as many tokens to every other, and get as many from it.

    The counts are asked for as in a run; read from fake tensors they would be zeros, and the tokens gone.
    """
    from verl_like.parallel import experts

    count, exchange, number = experts.count_each, experts._exchanged_counts, 0

    def count_each(number_S: Tensor, most: int) -> Tensor:
        nonlocal number
        number = len(number_S)
        return count(number_S, most)

    def exchanged_counts(count_GE: Tensor, group: Any) -> tuple[list[int], list[int], Tensor]:
        exchange(count_GE, group)
        sent = [number // group.size + (rank < number % group.size) for rank in range(group.size)]
        received = [sent[group.rank]] * group.size
        return sent, received, torch.empty(sum(received), dtype=torch.int64, device=count_GE.device)

    experts.count_each, experts._exchanged_counts = count_each, exchanged_counts
