"""Decode step of the hf engine for models of Llama's form, one token a row, without calls of their modules.

Few rows take as long as the calls do, not as the arithmetic: transformers calls modules within modules, and makes masks
anew in each step. Here queries, keys and values are one product and are rotated together, and sums with the residual
are part of the products. Keys and values go into the same cache, so that any step may be transformers' own.

Letters: b rows, S columns of the cache, H hidden size, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import DynamicCache, PreTrainedModel

from verl_like.rollout.hf_cache import GrowingLayer, new_cache

_KNOWN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """Weights of one layer; they share memory with the model's parameters, and change with them."""

    norm: Tensor
    qkv: Tensor  # [(query heads + 2 key heads) * D, H]
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None  # of queries, of keys (Qwen3)
    out: Tensor  # transposed, as are those below
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def of(cls, layer: Any) -> Self:
        attention, mlp = layer.self_attn, layer.mlp
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        normed = hasattr(attention, "q_norm")
        return cls(
            norm=layer.input_layernorm.weight,
            qkv=_joined([part.weight for part in parts]),
            qkv_bias=None if parts[0].bias is None else _joined([part.bias for part in parts]),
            head_norms=(attention.q_norm.weight, attention.k_norm.weight) if normed else None,
            out=attention.o_proj.weight.t(),
            mlp_norm=layer.post_attention_layernorm.weight,
            gate=mlp.gate_proj.weight.t(),
            up=mlp.up_proj.weight.t(),
            down=mlp.down_proj.weight.t(),
        )


class LeanDecoder:
    """Computation of the next token's logits from a model's own weights and cache."""

    def __init__(self, hf: Any) -> None:
        config, inner = hf.config, hf.model
        self._inner, self._head = inner, hf.lm_head
        self._eps, self._scale = config.rms_norm_eps, inner.layers[0].self_attn.scaling
        self._heads, self._key_heads = config.num_attention_heads, config.num_key_value_heads
        self._layers = [_Layer.of(layer) for layer in inner.layers]
        self._parts = list(hf.modules())

    @property
    def is_whole(self) -> bool:
        """True while no hook acts on the model's modules, as those of adapters do: here they would not be called."""
        return not any(part._forward_hooks or part._forward_pre_hooks for part in self._parts)

    @classmethod
    def of(cls, hf: PreTrainedModel) -> Self | None:
        """Make it for a model, whose parameters move into joint memory; None where the model has another form."""
        return cls(hf) if _fits(hf) else None

    def logits(self, ids_b1: Tensor, positions_b1: Tensor, mask_bS: Tensor, cache: DynamicCache) -> Tensor:
        """Compute logits [b, 1, V] behind these tokens, and put their keys and values into the cache.

        mask_bS: 1 in a row's own columns, with that of the token that comes.
        """
        x = self._inner.embed_tokens(ids_b1[:, 0])
        cos, sin = self._inner.rotary_emb(x, positions_b1)  # [b, 1, D]
        low, high = sin.chunk(2, -1)
        signed, hidden = torch.cat((-low, high), -1), mask_bS == 0
        bias = None
        if bool(hidden.any()):
            bias = torch.zeros_like(hidden, dtype=x.dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
        for layer, kept in zip(self._layers, cache.layers, strict=True):
            x = self._layer(layer, x, cos, signed, bias, kept)
        x = rms_norm(x, x.shape[-1:], self._inner.norm.weight, self._eps)
        return linear(x, self._head.weight)[:, None]

    def _layer(self, layer: _Layer, x: Tensor, cos: Tensor, signed: Tensor, bias: Tensor | None, kept: Any) -> Tensor:
        rows, dim, size = len(x), cos.shape[-1], x.shape[-1:]
        qkv = linear(rms_norm(x, size, layer.norm, self._eps), layer.qkv, layer.qkv_bias).view(rows, -1, dim)
        qk, v = qkv.split((self._heads + self._key_heads, self._key_heads), 1)
        if layer.head_norms is not None:
            pairs = zip(qk.split((self._heads, self._key_heads), 1), layer.head_norms, strict=True)
            qk = torch.cat([rms_norm(part, (dim,), weight, self._eps) for part, weight in pairs], 1)
        turned = (qk * cos).addcmul_(qk.roll(dim // 2, -1), signed)
        keys, values = kept.update(turned[:, self._heads :, None], v[:, :, None])
        asked = turned[:, : self._heads].view(rows, self._key_heads, -1, dim)  # heads that share keys, as more queries
        attended = scaled_dot_product_attention(asked, keys, values, attn_mask=bias, scale=self._scale)
        x = torch.addmm(x, attended.reshape(rows, -1), layer.out)
        normed = rms_norm(x, size, layer.mlp_norm, self._eps)
        return x.addmm_(silu(normed @ layer.gate, inplace=True).mul_(normed @ layer.up), layer.down)


def _fits(hf: Any) -> bool:
    if type(hf).__name__ not in _KNOWN or not type(hf).__module__.startswith("transformers.models."):
        return False
    config, layers = hf.config, hf.model.layers
    linears = [hf.lm_head]
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        summed = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if any(part.bias is not None for part in summed if isinstance(part, nn.Linear)):
            return False
        linears += [attention.q_proj, attention.k_proj, attention.v_proj, *summed]
    return (
        all(type(part) is nn.Linear and "forward" not in vars(part) for part in linears)
        and config.hidden_act == "silu"
        and all(type(layer) is GrowingLayer for layer in new_cache(config).layers)
        and 2 * hf.model.rotary_emb.inv_freq.numel() == layers[0].self_attn.head_dim
    )


def _joined(parameters: list[nn.Parameter]) -> Tensor:
    """Move parameters into one tensor, one behind the other, and return it."""
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole
