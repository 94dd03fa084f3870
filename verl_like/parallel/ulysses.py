"""Ulysses sequence parallelism: a rank of a group holds a slice of the tokens, and in attention a slice of the heads.

Around attention two all-to-alls change between [all heads, T / n tokens] and [heads / n, T tokens]; everything else in
the model works on tokens one by one and sees its slice alone. Source: Jacobs et al., DeepSpeed Ulysses (arXiv
2309.14509), section 3. Every rank computes the same loss from the answers of all slices, and sends back the gradient of
its own slice only, so that the sum of gradients over all ranks is the gradient of one loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceRanks:
    """Ranks that share the same rows: `size` neighbours, of which this process is number `rank`."""

    group: dist.ProcessGroup
    size: int
    rank: int

    @property
    def unit(self) -> int:
        """Tokens are filled up to a multiple of this number."""
        return self.size

    def places(self, total: int) -> Tensor:
        """Number this rank's tokens out of `total`, a multiple of `unit`: its slice, int64 [total / size]."""
        return torch.arange(total).chunk(self.size)[self.rank]

    def heads_in(self, x: Tensor) -> Tensor:
        """Exchange slices of tokens for slices of heads: [1, heads, T / n, D] -> [1, heads / n, T, D]."""
        _, heads, tokens, dim = x.shape
        sent = x[0].reshape(self.size, heads // self.size, tokens, dim)
        received = _AllToAll.apply(sent, self.group)  # [n slices, heads / n, T / n, D]
        return received.transpose(0, 1).reshape(1, heads // self.size, self.size * tokens, dim)

    def tokens_in(self, x: Tensor) -> Tensor:
        """Exchange slices of heads for slices of tokens: [1, T, heads / n, D] -> [1, T / n, heads, D]."""
        _, tokens, heads, dim = x.shape
        sent = x[0].reshape(self.size, tokens // self.size, heads, dim)
        received = _AllToAll.apply(sent, self.group)  # [n groups of heads, T / n, heads / n, D]
        return received.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, dim)

    def join(self, values: Tensor) -> Tensor:
        """Sum over the slices, each of which is zero where it has no answer; the gradient goes to every slice whole."""
        return _Join.apply(values, self.group)


def repeated_key_heads(num_heads: int, num_key_heads: int, size: int) -> int:
    """Number of times each key head is repeated, so that every rank of `size` gets whole groups of heads.

    Raises ValueError, with the numbers, where query heads do not divide, or key heads neither divide nor are divided.
    """
    if num_heads % size:
        sizes = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ValueError(
            f"ulysses_sequence_parallel_size={size} does not divide the model's {num_heads} attention heads: "
            f"use one of {sizes}"
        )
    if num_key_heads % size == 0:
        return 1
    if size % num_key_heads:
        raise ValueError(
            f"ulysses_sequence_parallel_size={size} neither divides the model's {num_key_heads} key-value heads nor is "
            "a multiple of them"
        )
    return size // num_key_heads


class _AllToAll(torch.autograd.Function):
    """All-to-all in which chunk i of the first axis goes to rank i; its own inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_to_all(grad, ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None
