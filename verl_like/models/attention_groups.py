"""Packed attention without a varlen kernel: sequences of about the same length share one batched call.

The packed tokens [T] are gathered into groups [count, width], padded on the right up to the longest of the group;
causal attention needs no mask for that, because padding comes after every real token. A new group costs a call with
its share of Python and autograd, padding costs work that grows with width squared: `_WASTE` balances the two, as
measured on a CPU (a call about 230 us forward and backward, a sequence of L tokens about 0.08 us x L^2). Long
sequences therefore go one by one, short ones in a few calls. A row that shares its beginning (prefix_tree.py) has
keys for its whole path, and queries for its own tokens; in a call with rows that share less it has queries for more of
them, whose results nobody reads. The gather also puts the tokens of one key-value head together, which is what batched
products need.

Of short rows on a CPU a group's call is matrix products: queries in blocks, each with the keys that it can see. What
fused kernels win on a GPU by never writing the scores, they lose there, where their tiles are small: batched products
over whole blocks are up to 3 times as fast up to 512 tokens (docs/performance.md). Blocks leave out the part of the
square that causality or a sliding window hides. The weights of a block are kept for the backward pass, so memory grows
with own tokens x whole row.

Letters: G rows x key-value heads, L tokens, F of them before the first query, Q = L - F, r query heads that share a
key-value head, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from verl_like.models import exact
from verl_like.models.attention_sinks import CPUKernel, attend_with_sinks
from verl_like.models.packing import Segments
from verl_like.models.token_layout import Groups, TokenLayout

_KEPT = 512  # [tokens] of a row whose masks are kept: 100 KB each for one query head a key-value head
_BLOCK = 64  # [tokens] of queries at a time, measured: smaller blocks leave out more, larger ones run faster


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_Gr: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Compute softmax(cap(scale q k^T)) v over the tokens that each token sees: [G, Q * r, D].

    Products are in the inputs' dtype; soft-capping and its softmax, and sums over blocks, in float32 at least.

    Args:
        q: queries [G, Q * r, D] of the last tokens; a token's r queries stand together.
        k: keys [G, L, D].
        v: values [G, L, D].
        scale: factor of the scores.
        window: a token sees that many tokens, itself included; None: all before it.
        softcap: c of c * tanh(scores / c); None caps nothing.
        sinks_Gr: one more score for each query, which leads to no value.
        first: tokens before the first query.
    """
    return _BlockAttention.apply(q, k, v, scale, window, softcap, sinks_Gr, first)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_Gr: Tensor | None,
        before: int,
    ) -> Tensor:
        repeats = q.shape[1] // (k.shape[1] - before)
        outputs, kept = [], []
        for start, end, first in _blocks(k.shape[1], window, before):
            block = slice((start - before) * repeats, (end - before) * repeats)
            q_block, k_seen = q[:, block], k[:, first:end].transpose(1, 2)
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
        ctx.settings = (scale, window, softcap is not None, None if sinks_Gr is None else sinks_Gr.dtype, before)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, *kept = ctx.saved_tensors
        scale, window, capped, sinks_dtype, before = ctx.settings
        repeats, blocks = q.shape[1] // (k.shape[1] - before), list(_blocks(k.shape[1], window, before))
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
        return grad_q, grad_k.total(), grad_v.total(), None, None, None, grad_sinks, None


def causal_band(start: int, end: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """Mask of the keys that each query sees: bool [end - start, end - first].

    Queries are the tokens start ... end - 1, keys the tokens first ... end - 1. A query sees no later key, and no
    further back than `window` tokens, itself included.
    """
    position = torch.arange(first, end, device=device)
    distance = position[start - first :, None] - position[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _blocks(length: int, window: int | None, before: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yield (first query, end of queries, first key) of each block; its keys end with its queries.

    before: tokens before the first query.
    """
    count = max(1, round((length - before) / _BLOCK))
    for start, end in itertools.pairwise(before + (length - before) * i // count for i in range(count + 1)):
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
_PRODUCTS = 512**2  # [queries x keys] up to which matrix products are used on a CPU: faster, but they need memory


def groups_of(segments: Segments) -> tuple[Groups, Groups]:
    """Layout of the queries and of the keys of these segments; computed once, then kept with them."""
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
    exact: sums have one order in every call (exact.py).
    """

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    exact: bool = False

    def check(self) -> None:
        """Check that these can go together; raises ValueError otherwise."""
        if self.dropout and (self.softcap is not None or self.sinks is not None):
            raise ValueError("attention dropout cannot be combined with this model's packed attention: set it to 0")


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, how: Scoring) -> Tensor:
    """Causal attention inside each segment; [1, heads, T, D] -> [T, heads, D]."""
    how.check()
    window, softcap, dropout = how.window, how.softcap, how.dropout
    (of_queries, of_keys), heads = groups_of(segments), key.shape[1]
    repeats = query.shape[1] // heads
    scale = query.shape[-1] ** -0.5 if how.scaling is None else how.scaling
    outputs = []
    laid_out = (of_queries.lay_out(query, heads), of_keys.lay_out(key, heads), of_keys.lay_out(value, heads))
    for q, k, v in zip(*laid_out, strict=True):
        banded = window if window is not None and window < k.shape[1] else None
        first = k.shape[1] - q.shape[1] // repeats
        if how.exact:
            usual = partial(_usual, heads=heads, repeats=repeats, scale=scale, window=banded)
            position_1Q = torch.arange(first, k.shape[1], device=k.device)[None]
            outputs.append(exact.attention(q, k, v, scale, banded, position_1Q, usual))
        elif softcap is not None or (not dropout and _by_products(k, first)) or (how.sinks is not None and k.is_cuda):
            sinks_Gr = None if how.sinks is None else how.sinks.view(heads, repeats).repeat(len(k) // heads, 1)
            outputs.append(block_attention(q, k, v, scale, banded, softcap, sinks_Gr, first))
        else:
            outputs.append(_by_heads(q, k, v, heads, repeats, scale, banded, dropout, how.sinks))
    return of_queries.join(outputs, heads, repeats)


def _usual(q: Tensor, k: Tensor, v: Tensor, *, heads: int, repeats: int, scale: float, window: int | None) -> Tensor:
    first = k.shape[1] - q.shape[1] // repeats
    if _by_products(k, first):
        return block_attention(q, k, v, scale, window, None, None, first)
    return _by_heads(q, k, v, heads, repeats, scale, window, 0.0, None)


def _by_products(key: Tensor, first: int) -> bool:
    few = (key.shape[1] - first) * key.shape[1] <= _PRODUCTS
    return key.device.type == "cpu" and key.dtype != torch.float16 and few


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
    length = q.shape[1] // repeats
    queries = q.view(-1, heads, length, repeats, q.shape[-1]).transpose(2, 3).flatten(1, 2)
    k, v = (t.view(-1, heads, t.shape[1], t.shape[-1]) for t in (k, v))
    output = _sdpa(queries, k, v, scale, window, dropout, sinks)
    return output.unflatten(1, (heads, repeats)).transpose(2, 3).reshape(-1, length * repeats, v.shape[-1])


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, dropout: float, sinks: Tensor | None
) -> Tensor:
    dtype, shared = q.dtype, q.shape[1] != k.shape[1]
    if q.device.type == "cpu" and dtype != torch.float32 and dtype != torch.float64:
        q, k, v = q.float(), k.float(), v.float()  # the half-precision backward pass is several times slower there
    elif shared and q.is_cuda:  # its memory-efficient kernel has no grouped queries
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        shared = False
    first, end = k.shape[2] - q.shape[2], k.shape[2]
    band = causal_band(first, end, 0, window, q.device) if first or window is not None else None
    if sinks is not None:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        return attend_with_sinks(q, k, v, sinks[:, None], CPUKernel(scale=scale, band=band)).to(dtype)
    return scaled_dot_product_attention(
        *(q, k, v), attn_mask=band, dropout_p=dropout, is_causal=band is None, scale=scale, enable_gqa=shared
    ).to(dtype)


def _build_groups(segments: Segments) -> tuple[Groups, Groups]:
    lengths, layout = segments.lengths, segments.layout
    before = [n - own for n, own in zip(lengths, segments.own_lengths, strict=True)]
    calls = _calls(lengths, before)
    rows = [s for members, _, _ in calls for s in members]
    first, width = torch.tensor([shape[1:] for shape in calls for _ in shape[0]]).unbind(1)
    length = torch.tensor(lengths)
    start = (length.cumsum(0) - length)[rows]
    shapes = tuple((len(members), width) for members, _, width in calls)
    none = torch.zeros_like(first)
    slot_K, real = _slots(start, length[rows], none, width, none)
    if layout is None:
        plain = torch.equal(slot_K, torch.arange(sum(lengths)))
        home_T = _positions(slot_K, real)
        groups = Groups(shapes=shapes, layout=None if plain else TokenLayout(gather_K=slot_K, home_T=home_T))
        return groups, groups
    whole = layout.to(torch.device("cpu"))
    of_keys = TokenLayout.of(whole.gather_K[slot_K].where(real, -1), _positions(slot_K, real)[whole.home_T])
    own_start = (torch.tensor(segments.own_lengths).cumsum(0) - length)[rows]  # had the input all tokens of the row
    slot_K, real = _slots(own_start, length[rows], first, width, torch.tensor(before)[rows])
    of_queries = TokenLayout(gather_K=slot_K, home_T=_positions(slot_K, real))
    fewer = tuple((len(members), width - first) for members, first, width in calls)
    return Groups(shapes=fewer, layout=of_queries), Groups(shapes=shapes, layout=of_keys)


def _calls(lengths: Sequence[int], firsts: Sequence[int]) -> list[tuple[list[int], int, int]]:
    """Choose the rows of each call, the first token that has a query in it, and its width: the longest first.

    firsts: tokens of each row that need no query.
    """
    calls: list[tuple[list[int], int, int]] = []
    least: list[int] = []  # of each call: the least work of a row, in tokens^2
    open_calls: list[int] = []
    for s in sorted(range(len(lengths)), key=lambda s: (-lengths[s], firsts[s])):
        length, first = lengths[s], firsts[s]
        if (length - first) * length > _PRODUCTS and 2 * first < length:
            first = 0  # a kernel that leaves out half of the square has less to do than one with a mask
        work = length**2 - first**2
        open_calls = [c for c in open_calls if calls[c][2] ** 2 - length**2 <= _WASTE]
        for c in open_calls:
            members, before, width = calls[c]
            if width**2 - min(before, first) ** 2 - min(least[c], work) <= _WASTE:
                members.append(s)
                calls[c], least[c] = (members, min(before, first), width), min(least[c], work)
                break
        else:
            open_calls.append(len(calls))
            calls.append(([s], first, length))
            least.append(work)
    return calls


def _slots(start_S: Tensor, length_S: Tensor, first_S: Tensor, width_S: Tensor, own_S: Tensor) -> tuple[Tensor, Tensor]:
    """List the tokens of each row from `first` to `width`, and which of them are its own; others repeat one of these.

    own_S: the first token of each row that is its own; the last is the row's last one.
    """
    count_S = width_S - first_S
    column = torch.arange(int(count_S.sum())) + (first_S - count_S.cumsum(0) + count_S).repeat_interleave(count_S)
    own, length = own_S.repeat_interleave(count_S), length_S.repeat_interleave(count_S)
    token = torch.minimum(column.maximum(own), length - 1)
    return start_S.repeat_interleave(count_S) + token, column == token


def _positions(slot_K: Tensor, real: Tensor) -> Tensor:
    """Find where each token stands among the slots that are its own."""
    found = torch.empty(int(real.sum()), dtype=torch.int64)
    found[slot_K[real]] = torch.arange(len(slot_K))[real]
    return found
