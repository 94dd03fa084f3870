"""Causal attention of short rows by matrix products: queries in blocks, each with the keys that it can see.

What fused kernels win on a GPU by never writing the scores, they lose on a CPU, where their tiles are small: batched
products over whole blocks are up to 3 times as fast there up to 512 tokens (docs/performance.md). Blocks leave out the
part of the square that causality or a sliding window hides. The weights of a block are kept for the backward pass, so
memory grows with the square of the row.

Letters: G rows x key-value heads, L tokens, r query heads that share a key-value head, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_KEPT = 512  # [tokens] of a row whose masks are kept: 100 KB each for one query head a key-value head
_BLOCK = 64  # [tokens] of queries at a time, measured: smaller blocks leave out more, larger ones run faster


def block_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """softmax(cap(scale q k^T)) v over what a token sees: [G, L * r, D] (a token's r queries stand together).

    k, v: [G, L, D]. window: a token sees that many tokens, itself included. softcap: c of c * tanh(scores / c).
    Products are in the inputs' dtype; soft-capping and its softmax, and sums over blocks, in float32.
    """
    return _BlockAttention.apply(q, k, v, scale, window, softcap)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        outputs, kept = [], []
        for start, end, first in _blocks(k.shape[1], window):
            q_block, k_seen = q[:, start * repeats : end * repeats], k[:, first:end].transpose(1, 2)
            hiding = partial(_kept_hiding if end <= _KEPT else _hiding, start, end, first, window, repeats)
            if softcap is None:
                scores = torch.baddbmm(hiding(q.dtype, q.device), q_block, k_seen, alpha=scale)
            else:
                tanh = torch.tanh(torch.bmm(q_block, k_seen).float() * (scale / softcap))
                scores = (tanh * softcap).add_(hiding(tanh.dtype, q.device))
                kept.append(tanh)
            weights = torch.softmax(scores, -1).to(q.dtype)
            kept.append(weights)
            outputs.append(torch.bmm(weights, v[:, first:end]))
        ctx.save_for_backward(q, k, v, *kept)
        ctx.settings = (scale, window, softcap is not None)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *kept = ctx.saved_tensors
        scale, window, capped = ctx.settings
        length, repeats = k.shape[1], q.shape[1] // k.shape[1]
        blocks = list(_blocks(length, window))
        dtype = k.dtype if len(blocks) == 1 else torch.promote_types(k.dtype, torch.float32)
        grads_q, grad_k, grad_v = [], _Sum(k, dtype), _Sum(v, dtype)
        for start, end, first in reversed(blocks):
            block = slice(start * repeats, end * repeats)
            weights = kept.pop()
            grad_v.add(torch.bmm(weights.transpose(1, 2), grad[:, block]), first, end)
            grad_weights = torch.bmm(grad[:, block], v[:, first:end].transpose(1, 2))
            slope = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            if capped:  # d (c tanh(x / c)) / d x = 1 - tanh^2
                slope = slope.float().mul_(1.0 - kept.pop().square()).to(weights.dtype)
            grads_q.append(torch.bmm(slope, k[:, first:end]).mul_(scale))
            grad_k.add(torch.bmm(slope.transpose(1, 2), q[:, block]).mul_(scale), first, end)
        grad_q = grads_q[0] if len(grads_q) == 1 else torch.cat(grads_q[::-1], 1)
        return grad_q, grad_k.total(), grad_v.total(), None, None, None


def causal_band(start: int, end: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """[end - start, end - first] bool: which of the tokens from `first` on those from `start` on see: causal, and no
    further back than `window` tokens, itself included."""
    position = torch.arange(first, end, device=device)
    distance = position[start - first :, None] - position[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _blocks(length: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """(first query, end of queries, first key) of each block; its keys end with its queries."""
    count = max(1, round(length / _BLOCK))
    for start, end in itertools.pairwise(length * i // count for i in range(count + 1)):
        yield start, end, 0 if window is None else max(0, start - window + 1)


def _hiding(
    start: int, end: int, first: int, window: int | None, repeats: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[1, (end - start) * r, end - first]: what is added to a block's scores, -inf where a query does not see a key."""
    seen = causal_band(start, end, first, window, device)
    added = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return added.repeat_interleave(repeats, 0)[None]


_kept_hiding = lru_cache(maxsize=64)(_hiding)  # the layers of a model ask for the same ones


class _Sum:
    """The gradient of keys or values [G, L, D], added up over blocks in `dtype`; the first to come may be all of it."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._sum: Tensor | None = None

    def add(self, part: Tensor, first: int, end: int) -> None:
        if self._sum is None and end - first == self._like.shape[1]:
            self._sum = part.to(self._dtype)
            return
        total = torch.zeros_like(self._like, dtype=self._dtype) if self._sum is None else self._sum
        total[:, first:end] += part
        self._sum = total

    def total(self) -> Tensor:
        assert self._sum is not None
        return self._sum.to(self._like.dtype)
