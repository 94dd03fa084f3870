"""Packed attention without a varlen kernel: sequences of about the same length share one batched call.

The packed tokens [T] are gathered into groups [count, width], padded on the right up to the longest of the group;
causal attention needs no mask for that, because padding comes after every real token. A new group costs a call with
its share of Python and autograd, padding costs work that grows with width squared: `_WASTE` balances the two, as
measured on a CPU (a call about 230 us forward and backward, a sequence of L tokens about 0.08 us x L^2). Long
sequences therefore go one by one, short ones in a few calls. Where rows share a prompt, its queries are part of each
row's call, and their result is read from the row that holds the prompt. The gather also puts the tokens of one
key-value head together, which is what batched products need.

Of short rows on a CPU a group's call is matrix products: queries in blocks, each with the keys that it can see. What
fused kernels win on a GPU by never writing the scores, they lose there, where their tiles are small: batched products
over whole blocks are up to 3 times as fast up to 512 tokens (docs/performance.md). Blocks leave out the part of the
square that causality or a sliding window hides. The weights of a block are kept for the backward pass, so memory grows
with the square of the row.

A row's queries may be its last tokens alone, where another row asks for those before (a shared prompt) or another rank
does (context parallelism).

Letters: G rows x key-value heads, L tokens, A of them that ask (the last), r query heads that share a key-value head,
D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from verl_like.models.attention_sinks import CPUKernel, attend_with_sinks
from verl_like.models.packing import Segments
from verl_like.models.token_layout import Groups, TokenLayout

_KEPT = 512  # [tokens] of a row whose masks are kept: 100 KB each for one query head a key-value head
_BLOCK = 64  # [tokens] of queries at a time, measured: smaller blocks leave out more, larger ones run faster


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    repeats: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_Gr: Tensor | None = None,
) -> Tensor:
    """Compute softmax(cap(scale q k^T)) v over the tokens that each token sees: [G, A * r, D].

    Products are in the inputs' dtype; soft-capping and its softmax, and sums over blocks, in float32 at least.

    Args:
        q: queries [G, A * r, D]; a token's r queries stand together.
        k: keys [G, L, D].
        v: values [G, L, D].
        repeats: r.
        scale: factor of the scores.
        window: a token sees that many tokens, itself included; None: all before it.
        softcap: c of c * tanh(scores / c); None caps nothing.
        sinks_Gr: one more score for each query, which leads to no value.
    """
    return _BlockAttention.apply(q, k, v, repeats, scale, window, softcap, sinks_Gr)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        repeats: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_Gr: Tensor | None,
    ) -> Tensor:
        outputs, kept = [], []
        blocks = list(_blocks(k.shape[1], window, asking=q.shape[1] // repeats))
        before = blocks[0][0]
        for start, end, first in blocks:
            q_block = q[:, (start - before) * repeats : (end - before) * repeats]
            k_seen = k[:, first:end].transpose(1, 2)
            hiding = partial(_kept_hiding if end <= _KEPT else _hiding, start, end, first, window, repeats)
            if softcap is None:
                scores = torch.baddbmm(hiding(q.dtype, q.device), q_block, k_seen, alpha=scale)
            else:
                wide = torch.promote_types(q.dtype, torch.float32)
                tanh = torch.tanh(torch.bmm(q_block, k_seen).to(wide) * (scale / softcap))
                scores = (tanh * softcap).add_(hiding(tanh.dtype, q.device))
                kept.append(tanh)
            if sinks_Gr is not None:  # a last column, which leads to no value
                scores = torch.cat([scores, sinks_Gr.repeat(1, end - start)[..., None].to(scores.dtype)], -1)
            weights = torch.softmax(scores, -1).to(q.dtype)
            kept.append(weights)
            outputs.append(torch.bmm(weights[..., : end - first], v[:, first:end]))
        ctx.save_for_backward(q, k, v, *kept)
        ctx.settings = (blocks, repeats, scale, softcap is not None, None if sinks_Gr is None else sinks_Gr.dtype)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *kept = ctx.saved_tensors
        blocks, repeats, scale, capped, sinks_dtype = ctx.settings
        before = blocks[0][0]
        dtype = k.dtype if len(blocks) == 1 else torch.promote_types(k.dtype, torch.float32)
        grads_q, grad_k, grad_v, grads_sinks = [], _Sum(k, dtype), _Sum(v, dtype), []
        for start, end, first in reversed(blocks):
            block = slice((start - before) * repeats, (end - before) * repeats)
            weights = kept.pop()
            grad_v.add(torch.bmm(weights[..., : end - first].transpose(1, 2), grad[:, block]), first, end)
            grad_weights = torch.bmm(grad[:, block], v[:, first:end].transpose(1, 2))
            if sinks_dtype is not None:
                grad_weights = torch.nn.functional.pad(grad_weights, (0, 1))
            slope = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
            if sinks_dtype is not None:
                of_sinks, slope = slope[..., -1], slope[..., :-1]
                grads_sinks.append(of_sinks.unflatten(1, (end - start, repeats)).sum(1, dtype=dtype))
            if capped:  # d (c tanh(x / c)) / d x = 1 - tanh^2
                slope = (1.0 - kept.pop().square()).mul_(slope).to(weights.dtype)
            grads_q.append(torch.bmm(slope, k[:, first:end]).mul_(scale))
            grad_k.add(torch.bmm(slope.transpose(1, 2), q[:, block]).mul_(scale), first, end)
        grad_q = grads_q[0] if len(grads_q) == 1 else torch.cat(grads_q[::-1], 1)
        grad_sinks = torch.stack(grads_sinks).sum(0).to(sinks_dtype) if grads_sinks else None
        return grad_q, grad_k.total(), grad_v.total(), None, None, None, None, grad_sinks


def causal_band(start: int, end: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """Mask of the keys that each query sees: bool [end - start, end - first].

    Queries are the tokens start ... end - 1, keys the tokens first ... end - 1. A query sees no later key, and no
    further back than `window` tokens, itself included.
    """
    position = torch.arange(first, end, device=device)
    distance = position[start - first :, None] - position[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _blocks(length: int, window: int | None, asking: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first query, end of queries, first key) of each block; its keys end with its queries."""
    count, before = max(1, round(asking / _BLOCK)), length - asking
    for start, end in itertools.pairwise(before + asking * i // count for i in range(count + 1)):
        yield start, end, 0 if window is None else max(0, start - window + 1)


def _hiding(
    start: int, end: int, first: int, window: int | None, repeats: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Bias of a block's scores, -inf where a query does not see a key: [1, (end - start) * r, end - first]."""
    seen = causal_band(start, end, first, window, device)
    added = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return added.repeat_interleave(repeats, 0)[None]


_kept_hiding = lru_cache(maxsize=64)(_hiding)  # the layers of a model ask for the same ones


class _Sum:
    """Gradient of keys or values [G, L, D], added up over blocks in `dtype`; the first to come may be all of it."""

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


_WASTE = 2048  # [tokens^2] padding of one sequence up to which it joins a group
_PRODUCTS_LENGTH = 512  # [tokens] up to which matrix products are used on a CPU: faster, but memory is quadratic


def groups_of(segments: Segments) -> tuple[Groups, Groups]:
    """Layouts of the queries and of the keys of these segments; computed once, then kept with them."""
    if segments.groups is None:
        segments.groups = _build_groups(segments)
    return segments.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Options that turn scores into weights.

    scaling: factor of the scores, None is 1 / sqrt(D).
    dropout: probability that a weight is dropped.
    window: a token sees that many tokens, itself included.
    softcap: c of c * tanh(scores / c).
    sinks: [heads], a further score of each query that leads to no value.
    """

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def check(self) -> None:
        """Check that these can go together; raises ValueError otherwise."""
        if self.dropout and (self.softcap is not None or self.sinks is not None):
            raise ValueError("attention dropout cannot be combined with this model's packed attention: set it to 0")


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, how: Scoring) -> Tensor:
    """Causal attention inside each segment; [1, heads, T, D] -> [T, heads, D]."""
    how.check()
    window, softcap, dropout = how.window, how.softcap, how.dropout
    (queries, keys), heads = groups_of(segments), key.shape[1]
    repeats = query.shape[1] // heads
    scale = query.shape[-1] ** -0.5 if how.scaling is None else how.scaling
    outputs = []
    laid_out = (queries.lay_out(query, heads, queries=True), keys.lay_out(key, heads), keys.lay_out(value, heads))
    for q, k, v in zip(*laid_out, strict=True):
        banded = window if window is not None and window < k.shape[1] else None
        if softcap is not None or (not dropout and _by_products(k)) or (how.sinks is not None and k.is_cuda):
            sinks_Gr = None if how.sinks is None else how.sinks.view(heads, repeats).repeat(len(k) // heads, 1)
            outputs.append(block_attention(q, k, v, repeats, scale, banded, softcap, sinks_Gr))
        else:
            outputs.append(_by_heads(q, k, v, heads, repeats, scale, banded, dropout, how.sinks))
    return queries.join(outputs, heads, repeats)


def _by_products(key: Tensor) -> bool:
    return key.device.type == "cpu" and key.dtype != torch.float16 and key.shape[1] <= _PRODUCTS_LENGTH


def _by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    repeats: int,
    scale: float,
    window: int | None,
    dropout: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of the shapes of `block_attention`, through SDPA's [count, heads * r, width, D]."""
    asking = q.shape[1] // repeats
    queries = q.view(-1, heads, asking, repeats, q.shape[-1]).transpose(2, 3).flatten(1, 2)
    k, v = (t.view(-1, heads, t.shape[1], t.shape[2]) for t in (k, v))
    output = _sdpa(queries, k, v, scale, window, dropout, sinks)
    return output.unflatten(1, (heads, repeats)).transpose(2, 3).reshape(-1, asking * repeats, v.shape[-1])


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, dropout: float, sinks: Tensor | None
) -> Tensor:
    dtype, shared = q.dtype, q.shape[1] != k.shape[1]
    if q.device.type == "cpu" and dtype != torch.float32 and dtype != torch.float64:
        q, k, v = q.float(), k.float(), v.float()  # the half-precision backward pass is several times slower there
    elif shared and q.is_cuda:  # its memory-efficient kernel has no grouped queries
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        shared = False
    asking, length = q.shape[2], k.shape[2]
    whole = window is None and asking == length
    band = None if whole else causal_band(length - asking, length, 0, window, q.device)
    if sinks is not None:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        return attend_with_sinks(q, k, v, sinks[:, None], CPUKernel(scale=scale, band=band)).to(dtype)
    return scaled_dot_product_attention(
        *(q, k, v), attn_mask=band, dropout_p=dropout, is_causal=band is None, scale=scale, enable_gqa=shared
    ).to(dtype)


def _build_groups(segments: Segments) -> tuple[Groups, Groups]:
    length_S = torch.tensor(segments.lengths)
    before_S = length_S - torch.tensor(segments.own_lengths)  # tokens that do not ask
    lengths, before = length_S.tolist(), before_S.tolist()
    order = sorted(range(len(lengths)), key=lambda s: (-lengths[s], before[s]))
    groups: list[list[int]] = []
    for s in order:
        longest = groups[-1][0] if groups else s
        added = lengths[longest] ** 2 - lengths[s] ** 2 + lengths[longest] * abs(before[s] - before[longest])
        if not groups or added > _WASTE:
            groups.append([])
        groups[-1].append(s)
    columns = [(len(group), min(before[s] for s in group), lengths[group[0]]) for group in groups]
    from_start = [(count, 0, width) for count, _, width in columns]
    keys = _laid_out(from_start, order, torch.zeros_like(before_S), length_S, segments.layout)
    return (keys if segments.layout is None else _laid_out(columns, order, before_S, length_S, None)), keys


def _laid_out(
    columns: list[tuple[int, int, int]], order: list[int], first_S: Tensor, end_S: Tensor, layout: TokenLayout | None
) -> Groups:
    """Lay the tokens first ... end - 1 of each row out in columns of its group; columns without one repeat another.

    Args:
        columns: (count of rows, first column, end of columns) of each group.
        order: rows as the groups take them.
        first_S: of each row.
        end_S: of each row.
        layout: finds these tokens in the packed input; None: they are the packed input.
    """
    start_S = (end_S - first_S).cumsum(0) - end_S  # of the row's first column, had the input all before `first`
    count_G, first_G, end_G = torch.tensor(columns).T
    end_R, width_R = (of_group.repeat_interleave(count_G) for of_group in (end_G, end_G - first_G))
    row_K = torch.tensor(order).repeat_interleave(width_R)
    column_K = torch.arange(len(row_K)) + (end_R - width_R.cumsum(0)).repeat_interleave(width_R)
    position_K = torch.minimum(column_K.maximum(first_S[row_K]), end_S[row_K] - 1)
    gather_K, real_K = start_S[row_K] + position_K, column_K == position_K
    shapes = tuple((count, end - first) for count, first, end in columns)
    if torch.equal(gather_K, torch.arange(int(real_K.sum()))):
        return Groups(shapes=shapes, layout=layout)
    slot_T = torch.empty(int(real_K.sum()), dtype=torch.int64)
    slot_T[gather_K[real_K]] = real_K.nonzero()[:, 0]
    if layout is None:
        return Groups(shapes=shapes, layout=TokenLayout(gather_K=gather_K, home_T=slot_T))
    whole = layout.to(torch.device("cpu"))
    return Groups(shapes=shapes, layout=whole.moved(slot_T, whole.gather_K[gather_K]))
