"""Attention function for packed tokens, registered with transformers' attention interface.

The model call carries `segments`; queries, keys and values are [1, heads, T, head_dim] over all segments. On CUDA in
half precision FlashAttention (3 or 2) runs where it is installed, torch's own varlen attention otherwise, and always
for attention with sinks (attention_sinks.py); elsewhere, and for soft-capped scores without FlashAttention, sequences
of similar length share a batched call (attention_groups.py). No mask is ever built for the packed sequence.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from verl_like.models import exact
from verl_like.models.attention_groups import Scoring, grouped_attention
from verl_like.models.attention_sinks import VarlenKernel, attend_with_sinks
from verl_like.models.packing import Segments
from verl_like.parallel.ulysses import repeated_key_heads

ATTENTION_NAME, EXACT_NAME = "verl_like_packed", "verl_like_exact"


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment; [1, heads, T, head_dim] -> [1, T, heads, head_dim].

    The signature is that of transformers' attention interface.

    Args:
        module: the attention module that calls.
        query: [1, heads, T, head_dim].
        key: [1, key heads, T, head_dim].
        value: [1, key heads, T, head_dim].
        attention_mask: not used: segments take its place.
        segments: sequences of the packed input.
        scaling: factor of the scores; None is 1 / sqrt(head_dim).
        dropout: probability that a weight is dropped.
        softcap: c of c * tanh(scores / c).
        s_aux: [heads], a sink of each: a further score that leads to no value.
        more: of it sliding_window is read: a token sees that many tokens, itself included. Where it is not handed on
            (Qwen2-MoE leaves it to its masks) it is the module's own.

    Raises ValueError for dropout, where the scores are soft-capped or have sinks.
    """
    sharing = segments.heads
    if sharing is not None:  # queries of all tokens for some of the heads
        repeats = repeated_key_heads(query.shape[1], key.shape[1], sharing.size)
        if repeats > 1:
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        query, key, value = (sharing.heads_in(t) for t in (query, key, value))
        s_aux = None if s_aux is None else s_aux.view(sharing.size, -1)[sharing.rank]
    if segments.seen is not None:
        key, value = segments.seen.gather(key, value)
    own: int | None = getattr(module, "sliding_window", None)
    sliding_window: int | None = more.get("sliding_window", own)
    window = None if sliding_window is None or sliding_window >= segments.max_length else sliding_window
    how = Scoring(scaling=scaling, dropout=dropout, window=window, softcap=softcap, sinks=s_aux)
    output = _attend(query, key, value, segments, how)[None]
    return output if sharing is None else sharing.tokens_in(output), None


def exact_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | exact.Columns,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention whose sums have one order, of packed tokens or of a padded batch with its cache (exact.py).

    Shapes and signature are those of `packed_attention`; in a padded batch [b, heads, s, head_dim] with keys of S
    columns becomes [b, s, heads, head_dim].
    """
    if isinstance(segments, exact.Columns):
        return exact.padded_attention(query, key, value, segments, scaling, sliding_window), None
    window = None if sliding_window is None or sliding_window >= segments.max_length else sliding_window
    how = Scoring(scaling=scaling, window=window, exact=not exact.is_ordinary())
    return grouped_attention(query, key, value, segments, how)[None], None


def _attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, how: Scoring) -> Tensor:
    """Run the attention function that fits device and precision; [1, heads, T, head_dim] -> [T, heads, head_dim]."""
    half_on_gpu = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if half_on_gpu and (how.softcap is None or flash_attention_version() is not None):
        return _varlen(query, key, value, segments, how)
    return grouped_attention(query, key, value, segments, how)


def hand_on_segments(hf: PreTrainedModel) -> None:
    """Hand `segments` on to the attention of layers that are called with it and keep it to themselves, in place.

    Source: StableLmDecoderLayer and NemotronDecoderLayer of transformers 5.19.
    """
    for layer in hf.modules():
        for part in layer.children():
            if type(part).__name__.endswith("Attention"):
                call = dict[str, Any]()
                layer.register_forward_pre_hook(functools.partial(_keep, call), with_kwargs=True)
                part.register_forward_pre_hook(functools.partial(_hand_on, call), with_kwargs=True)


def _keep(call: dict[str, Any], _: torch.nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
    call["segments"] = kwargs.get("segments")  # of another batch where a layer is computed again


def _hand_on(call: dict[str, Any], _: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs if call["segments"] is None else kwargs | call


def register() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers; repeated calls are harmless."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionInterface.register(EXACT_NAME, exact_attention)
    for name in (ATTENTION_NAME, EXACT_NAME):
        AttentionMaskInterface.register(name, lambda *_, **__: None)  # masks are in the segments


@functools.cache
def flash_attention_version() -> int | None:
    """Version of FlashAttention: 3 on Hopper with flash_attn_interface, else 2 with flash_attn, else None."""
    if importlib.util.find_spec("flash_attn_interface") is not None and torch.cuda.get_device_capability()[0] == 9:
        return 3
    return 2 if _has_flash_attention_2() else None


def _has_flash_attention_2() -> bool:
    """Check that FlashAttention 2 is installed.

    FlashAttention 4, which serving engines bring along, has the same name, but no module of that name itself.
    """
    found = importlib.util.find_spec("flash_attn")
    return found is not None and found.origin is not None


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, how: Scoring) -> Tensor:
    if value.shape[-1] < query.shape[-1]:  # of DeepSeek's latent attention: kernels want one size
        wide = torch.nn.functional.pad(value, (0, query.shape[-1] - value.shape[-1]))
        return _varlen(query, key, wide, segments, how)[..., : value.shape[-1]]
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [T, heads, head_dim]
    if segments.layout is not None:  # a row's queries are its last tokens: causal masks are aligned at the end
        k, v = segments.layout.spread(k), segments.layout.spread(v)
    version, left = flash_attention_version(), -1 if how.window is None else how.window - 1
    if how.sinks is not None:
        how.check()
        bounds = {"cu_q": segments.cu_own, "cu_k": segments.cu_seqlens}
        longest = {"max_q": segments.max_own_length, "max_k": segments.max_length}
        return attend_with_sinks(q, k, v, how.sinks, VarlenKernel(**bounds, **longest, scale=how.scaling, left=left))
    if version is None or (how.dropout and version == 3 and not _has_flash_attention_2()):
        if how.dropout:
            raise ValueError("attention dropout on packed sequences needs flash-attn: install it, or set dropout to 0")
        return _torch_varlen(q, k, v, segments, how.scaling, left)
    options: dict[str, Any] = {
        "cu_seqlens_q": segments.cu_own,
        "cu_seqlens_k": segments.cu_seqlens,
        "max_seqlen_q": segments.max_own_length,
        "max_seqlen_k": segments.max_length,
        "softmax_scale": how.scaling,
        "causal": True,
        "window_size": (-1, -1) if how.window is None else (left, 0),
        "softcap": how.softcap or 0.0,
        "deterministic": torch.are_deterministic_algorithms_enabled(),  # of the backward pass
    }
    if version == 3 and not how.dropout:
        from flash_attn_interface import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        output = flash_attn_varlen_func(q, k, v, **options)
        return output[0] if isinstance(output, tuple) else output  # earlier builds also return the logsumexp
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func(q, k, v, dropout_p=how.dropout, **options)


def _torch_varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scaling: float | None, left: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = (segments.cu_own, segments.cu_seqlens), (segments.max_own_length, segments.max_length)
    options: dict[str, Any] = {"scale": scaling, "window_size": (left, 0)}
    if q.shape[1] != k.shape[1] and _varlen_asks_for_shared_keys():
        options["enable_gqa"] = True
    output = varlen_attn(q, k, v, *bounds, *longest, **options)
    assert isinstance(output, Tensor)
    return output


@functools.cache
def _varlen_asks_for_shared_keys() -> bool:
    """Check that varlen_attn wants to be told of fewer key heads than query heads.

    From torch 2.12 on it compares their numbers. The kernel behind it shares key heads in every version.
    """
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters
