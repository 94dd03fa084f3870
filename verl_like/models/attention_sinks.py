"""Attention with sinks around kernels that know of none: the sums of their scores bring them in afterwards.

A sink is a number s of each head that stands beside the scores in the softmax and leads to no value (gpt-oss). With
lse, the log of the sum of exp(scores), which flash kernels compute anyway, an output is that without the sink times
sigmoid(lse - s). These kernels return lse without a gradient: rescaled outside of them, outputs would be right and
gradients silently wrong. So the product is a function of its own here. Its backward pass is the kernel's, given the
rescaled output and lse' = log(exp(lse) + exp(s)): from these two a flash kernel makes its weights exp(scores - lse')
and the mean of their gradients (FlashAttention-2, arXiv 2307.08691, algorithm 2), so that what it returns is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Kernel(Protocol):
    """Flash attention, forward and backward apart. lse has the shape of the output without its last axis."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
    """Compute the kernel's attention with a sink beside its scores. sinks: of a shape that broadcasts to lse."""
    return _WithSinks.apply(q, k, v, sinks, kernel)


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: Kernel
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v)
        whole = torch.logaddexp(lse, sinks.to(lse.dtype))
        out = (out * torch.exp(lse - whole)[..., None]).to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, whole)
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, sinks, out, whole = ctx.saved_tensors
        of_inputs = ctx.kernel.backward(grad, q, k, v, out, whole)
        mean = (grad.to(whole.dtype) * out.to(whole.dtype)).sum(-1)  # a sink leads to a value of 0
        of_sinks = -torch.exp(sinks.to(whole.dtype) - whole) * mean
        return *of_inputs, of_sinks.sum_to_size(sinks.shape).to(sinks.dtype), None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarlenKernel:
    """torch's varlen operator on [T, heads, D]; see torch.nn.attention.varlen.

    cu_q, cu_k: bounds of the sequences, int32 [S + 1]. max_q, max_k: length of the longest.
    scale: factor of the scores. left: a token sees that many before it; -1: all.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    scale: float | None
    left: int

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        import torch.nn.attention.varlen  # it registers the operator

        out, lse_HT, _ = torch.ops.torch_attn._varlen_attn(
            *(q, k, v), *self._bounds(), self.left == -1, self.scale, [self.left, 0]
        )
        return out, lse_HT.transpose(0, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse_HT, noise = lse.transpose(0, 1).contiguous(), torch.zeros(2, dtype=torch.uint64, device=q.device)
        return torch.ops.torch_attn._varlen_attn_backward(
            *(grad.contiguous(), q, k, v, out, lse_HT, *self._bounds()),
            *(self.left == -1, noise, self.scale, [self.left, 0]),
        )

    def _bounds(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_q, self.cu_k, self.max_q, self.max_k


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CPUKernel:
    """The kernel behind SDPA on a CPU, causal, on [count, heads, L, D] with as many key heads as query heads.

    scale: factor of the scores. band: bool [L, L], the keys that each query sees; None: all before it.
    """

    scale: float
    band: Tensor | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        hiding = self._hiding(q.dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(q, k, v), 0.0, hiding is None, attn_mask=hiding, scale=self.scale
        )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        hiding = self._hiding(q.dtype)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(grad, q, k, v, out, lse), 0.0, hiding is None, attn_mask=hiding, scale=self.scale
        )

    def _hiding(self, dtype: torch.dtype) -> Tensor | None:
        return (
            None if self.band is None else torch.zeros_like(self.band, dtype=dtype).masked_fill_(~self.band, -torch.inf)
        )
