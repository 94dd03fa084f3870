"""Packed attention without a varlen kernel: sequences of about the same length share one batched call.

The packed tokens [T] are gathered into groups [count, width], padded on the right up to the longest of the group;
causal attention needs no mask for that, because padding comes after every real token. A new group costs a call with
its share of Python and autograd, padding costs work that grows with width squared: `_WASTE` balances the two, as
measured on a CPU (a call about 230 us forward and backward, a sequence of L tokens about 0.08 us x L^2). Long
sequences therefore go one by one, short ones in a few calls. Where rows share a prompt, its queries are part of each
row's call, and their result is read from the row that holds the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from verl_like.models.packing import Segments
from verl_like.models.token_layout import TokenLayout

_WASTE = 2048  # [tokens^2] padding of one sequence up to which it joins a group
_MATH_LENGTH = 512  # [tokens] up to which bfloat16 matrix products beat float32 flash attention on a CPU


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """How packed tokens are laid out for batched calls. `layout` is None where nothing moves."""

    shapes: tuple[tuple[int, int], ...]  # (count, width) of each group
    layout: TokenLayout | None

    def lay_out(self, packed: Tensor, *, queries: bool = False) -> tuple[Tensor, ...]:
        """[1, heads, T, D] -> one [count, heads, width, D] a group."""
        tokens = packed[0].transpose(0, 1)  # [T, heads, D], contiguous as models compute it
        if self.layout is not None:
            tokens = self.layout.spread(tokens, queries=queries)
        parts = tokens.split([count * width for count, width in self.shapes])
        pairs = zip(parts, self.shapes, strict=True)
        return tuple(part.unflatten(0, shape).transpose(1, 2) for part, shape in pairs)

    def join(self, outputs: list[Tensor]) -> Tensor:
        """The way back: [count, heads, width, D] each -> [T, heads, D]."""
        rows = [output.transpose(1, 2).flatten(0, 1) for output in outputs]
        joined = rows[0] if len(rows) == 1 else torch.cat(rows)
        return joined if self.layout is None else self.layout.collect(joined)


def groups_of(segments: Segments) -> Groups:
    """The layout of these segments; computed once, then kept with them."""
    if segments.groups is None:
        segments.groups = _build_groups(segments)
    return segments.groups


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention inside each segment; [1, heads, T, D] -> [T, heads, D]."""
    groups = groups_of(segments)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    laid_out = (groups.lay_out(query, queries=True), groups.lay_out(key), groups.lay_out(value))
    for q, k, v in zip(*laid_out, strict=True):
        banded = window if window is not None and window < q.shape[2] else None
        if softcap is not None or _short_half_on_cpu(q):
            if dropout:
                raise ValueError("attention dropout cannot be combined with this model's packed attention: set it to 0")
            outputs.append(_MathAttention.apply(q, k, v, scale, banded, softcap))
        else:
            outputs.append(_sdpa(q, k, v, scale, banded, dropout))
    return groups.join(outputs)


def _short_half_on_cpu(query: Tensor) -> bool:
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] <= _MATH_LENGTH


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, dropout: float) -> Tensor:
    dtype, shared = q.dtype, q.shape[1] != k.shape[1]
    if q.device.type == "cpu" and dtype != torch.float32 and dtype != torch.float64:
        q, k, v = q.float(), k.float(), v.float()  # the half-precision backward pass is several times slower there
    elif shared and q.is_cuda:  # its memory-efficient kernel has no grouped queries
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        shared = False
    band = None if window is None else causal_band(q.shape[2], window, q.device)
    return scaled_dot_product_attention(
        *(q, k, v), attn_mask=band, dropout_p=dropout, is_causal=band is None, scale=scale, enable_gqa=shared
    ).to(dtype)


def causal_band(length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, length] bool: what a token sees; causal, and no further back than `window` tokens, itself included."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


class _MathAttention(torch.autograd.Function):
    """softmax(cap(scale q k^T) + mask) v with grouped queries, by matrix products. [C, heads, L, D] each.

    Products are in the inputs' dtype; soft-capping and its softmax in float32.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        shape, repeats = q.shape, q.shape[1] // k.shape[1]
        flat_q, flat_k, flat_v = _merge_heads(q, repeats), _merge_heads(k, 1), _merge_heads(v, 1)
        hidden = causal_band(shape[2], window, q.device).logical_not().repeat(repeats, 1)
        tanh = None
        if softcap is None:
            mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
            scores = torch.baddbmm(mask[None], flat_q, flat_k.transpose(1, 2), alpha=scale)
        else:
            tanh = torch.bmm(flat_q, flat_k.transpose(1, 2)).float().mul_(scale / softcap).tanh_()
            scores = (tanh * softcap).masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, -1).to(q.dtype)
        ctx.save_for_backward(flat_q, flat_k, flat_v, weights, *(() if tanh is None else (tanh,)))
        ctx.settings = (shape, k.shape, scale)
        return _split_heads(torch.bmm(weights, flat_v), shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, weights, *capped = ctx.saved_tensors
        q_shape, kv_shape, scale = ctx.settings
        grad = _merge_heads(grad, q_shape[1] // kv_shape[1])
        grad_v = torch.bmm(weights.transpose(1, 2), grad)
        grad_weights = torch.bmm(grad, v.transpose(1, 2))
        slope = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        if capped:  # d (c tanh(x / c)) / d x = 1 - tanh^2
            slope = slope.float().mul_(1.0 - capped[0].square()).to(weights.dtype)
        grad_q = torch.bmm(slope, k).mul_(scale)
        grad_k = torch.bmm(slope.transpose(1, 2), q).mul_(scale)
        kv_grads = (_split_heads(t, kv_shape) for t in (grad_k, grad_v))
        return _split_heads(grad_q, q_shape), *kv_grads, None, None, None


def _merge_heads(x: Tensor, repeats: int) -> Tensor:
    """[C, heads, L, D] -> [C * heads / repeats, repeats * L, D]: queries of one key head stand below each other."""
    count, heads, length, dim = x.shape
    return x.reshape(count * (heads // repeats), repeats * length, dim)


def _split_heads(x: Tensor, shape: torch.Size) -> Tensor:
    return x.view(shape)


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
    device = segments.cu_seqlens.device
    if segments.layout is None:
        layout = TokenLayout(gather_K=gather, home_T=slot_K)
    else:
        whole = segments.layout.to(torch.device("cpu"))
        layout = whole.moved(slot_K, whole.gather_K[gather])
    return Groups(shapes=tuple(shapes), layout=layout.to(device))
