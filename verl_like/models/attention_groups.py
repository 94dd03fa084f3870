"""Packed attention without a varlen kernel: sequences of about the same length share one batched call.

The packed tokens [T] are gathered into groups [count, width], padded on the right up to the longest of the group;
causal attention needs no mask for that, because padding comes after every real token. A new group costs a call with
its share of Python and autograd, padding costs work that grows with width squared: `_WASTE` balances the two, as
measured on a CPU (a call about 230 us forward and backward, a sequence of L tokens about 0.08 us x L^2). Long
sequences therefore go one by one, short ones in a few calls. Where rows share a prompt, its queries are part of each
row's call, and their result is read from the row that holds the prompt. The gather also puts the tokens of one
key-value head together, which is what batched products need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from verl_like.models.attention_blocks import block_attention, causal_band
from verl_like.models.group_layout import Groups
from verl_like.models.packing import Segments
from verl_like.models.token_layout import TokenLayout

_WASTE = 2048  # [tokens^2] padding of one sequence up to which it joins a group
_PRODUCTS_LENGTH = 512  # [tokens] up to which matrix products are used on a CPU: faster, but memory is quadratic


def groups_of(segments: Segments) -> Groups:
    """The layout of these segments; computed once, then kept with them."""
    if segments.groups is None:
        segments.groups = _build_groups(segments)
    return segments.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How scores become weights. scaling: their factor, None is 1 / sqrt(D). window: a token sees that many tokens,
    itself included. softcap: c of c * tanh(scores / c)."""

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, how: Scoring) -> Tensor:
    """Causal attention inside each segment; [1, heads, T, D] -> [T, heads, D]."""
    window, softcap, dropout = how.window, how.softcap, how.dropout
    if softcap is not None and dropout:
        raise ValueError("attention dropout cannot be combined with this model's packed attention: set it to 0")
    groups, heads = groups_of(segments), key.shape[1]
    repeats = query.shape[1] // heads
    scale = query.shape[-1] ** -0.5 if how.scaling is None else how.scaling
    outputs = []
    laid_out = (groups.lay_out(query, heads, queries=True), groups.lay_out(key, heads), groups.lay_out(value, heads))
    for q, k, v in zip(*laid_out, strict=True):
        banded = window if window is not None and window < k.shape[1] else None
        if softcap is not None or (not dropout and _by_products(k)):
            outputs.append(block_attention(q, k, v, scale, banded, softcap))
        else:
            outputs.append(_by_heads(q, k, v, heads, repeats, scale, banded, dropout))
    return groups.join(outputs, heads, repeats)


def _by_products(key: Tensor) -> bool:
    return key.device.type == "cpu" and key.dtype != torch.float16 and key.shape[1] <= _PRODUCTS_LENGTH


def _by_heads(
    q: Tensor, k: Tensor, v: Tensor, heads: int, repeats: int, scale: float, window: int | None, dropout: float
) -> Tensor:
    """The same shapes as `block_attention`, through SDPA's [count, heads * r, width, D]."""
    length = k.shape[1]
    queries = q.view(-1, heads, length, repeats, q.shape[-1]).transpose(2, 3).flatten(1, 2)
    k, v = (t.view(-1, heads, length, t.shape[-1]) for t in (k, v))
    output = _sdpa(queries, k, v, scale, window, dropout)
    return output.unflatten(1, (heads, repeats)).transpose(2, 3).reshape(-1, length * repeats, v.shape[-1])


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, dropout: float) -> Tensor:
    dtype, shared = q.dtype, q.shape[1] != k.shape[1]
    if q.device.type == "cpu" and dtype != torch.float32 and dtype != torch.float64:
        q, k, v = q.float(), k.float(), v.float()  # the half-precision backward pass is several times slower there
    elif shared and q.is_cuda:  # its memory-efficient kernel has no grouped queries
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        shared = False
    band = None if window is None else causal_band(0, q.shape[2], 0, window, q.device)
    return scaled_dot_product_attention(
        *(q, k, v), attn_mask=band, dropout_p=dropout, is_causal=band is None, scale=scale, enable_gqa=shared
    ).to(dtype)


def _build_groups(segments: Segments) -> Groups:
    lengths = segments.lengths
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    shapes: list[tuple[int, int]] = []
    order = sorted(range(len(lengths)), key=lambda s: -lengths[s])
    for s in order:
        if not shapes or shapes[-1][1] ** 2 - lengths[s] ** 2 > _WASTE:
            shapes.append((0, lengths[s]))
        shapes[-1] = (shapes[-1][0] + 1, shapes[-1][1])
    widths = torch.tensor([width for count, width in shapes for _ in range(count)])
    start, length = torch.tensor(starts)[order], torch.tensor(lengths)[order]
    slot_start = widths.cumsum(0) - widths
    column = torch.arange(int(widths.sum())) - slot_start.repeat_interleave(widths)
    gather = start.repeat_interleave(widths) + torch.minimum(column, (length - 1).repeat_interleave(widths))
    if torch.equal(gather, torch.arange(starts[-1])):
        return Groups(shapes=tuple(shapes), layout=segments.layout)
    real = column < length.repeat_interleave(widths)
    slot_K = torch.empty(starts[-1], dtype=torch.int64)
    slot_K[gather[real]] = torch.arange(len(gather))[real]
    if segments.layout is None:
        layout = TokenLayout(gather_K=gather, home_T=slot_K)
    else:
        whole = segments.layout.to(torch.device("cpu"))
        layout = whole.moved(slot_K, whole.gather_K[gather])
    return Groups(shapes=tuple(shapes), layout=layout)
