"""One attention function for packed tokens, registered with transformers' attention interface.

The model call carries `segments`; queries, keys and values are [1, heads, T, head_dim] over all segments. On CUDA in
half precision FlashAttention runs where it is installed, torch's own varlen attention otherwise; elsewhere SDPA runs
segment by segment, neighbours of equal length in one call. No mask is ever built for the packed sequence.
"""

from __future__ import annotations

import importlib.util
import inspect
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from verl_like.models.packing import Segments

ATTENTION_NAME = "verl_like_packed"


@torch.compiler.disable  # segments differ from call to call: compiled code would be made again and again
def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment; [1, heads, T, head_dim] -> [1, T, heads, head_dim].

    `sliding_window`: a token sees that many tokens, itself included. Raises ValueError for what is not built yet.
    """
    if softcap is not None or s_aux is not None:
        raise ValueError(
            "attention with soft-capping or attention sinks is not available yet for packed sequences: "
            "set actor_rollout_ref.model.use_remove_padding=False"
        )
    window = None if sliding_window is None or sliding_window >= segments.max_length else sliding_window
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        output = _varlen(query, key, value, segments, scaling, dropout, window)
    else:
        output = _segment_by_segment(query, key, value, segments, scaling, dropout, window)
    return output[None], None


def register() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers; repeated calls are harmless."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, heads, head_dim]
    bounds, longest = segments.cu_seqlens, segments.max_length
    left = -1 if window is None else window - 1
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        return flash_attn_varlen_func(
            *(q, k, v, bounds, bounds, longest, longest),
            dropout_p=dropout,
            softmax_scale=scaling,
            causal=True,
            window_size=(left, 0) if window is not None else (-1, -1),
        )
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise ValueError("attention dropout on packed sequences needs flash-attn: install it, or set dropout to 0")
    options: dict[str, Any] = {"scale": scaling, "window_size": (left, 0)}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:  # earlier versions of torch
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    output = varlen_attn(*(q, k, v, bounds, bounds, longest, longest), **options)
    assert isinstance(output, Tensor)
    return output


def _segment_by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    # one split for all groups: slicing would make the backward pass add up a full-size gradient per slice
    groups = [(length, len(list(same))) for length, same in groupby(segments.lengths)]
    pieces = (t[0].split([length * count for length, count in groups], dim=1) for t in (query, key, value))
    outputs = []
    for (length, count), *qkv in zip(groups, *pieces, strict=True):
        q, k, v = (t.unflatten(1, (count, length)).transpose(0, 1) for t in qkv)
        band = None if window is None or window >= length else _band(length, window, query.device)
        attended = scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=band,
            dropout_p=dropout,
            is_causal=band is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))  # [count * length, heads, head_dim]
    return torch.cat(outputs)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length] bool: causal, and no further back than the window."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)
