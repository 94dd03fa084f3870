"""Cost of a model, from its own shape: floating-point operations, bytes of weights and cache.

Counted are matrix products and attention, a multiply and an add as two operations. Norms, rotary embedding, softmax and
element-wise work are left out, as in published figures of model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B).
A backward pass costs twice its forward pass; activations computed twice (checkpointing) are not counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PretrainedConfig

from verl_like.models.families import model_class, num_experts, parts_beside_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKWARD = 2.0  # of a forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Shape of a decoder-only model, as far as its cost depends on it."""

    body_weights: int  # numbers in the matrices that every token is multiplied with: no vision tower's
    head_weights: int  # numbers in the output head, which only predicted tokens meet
    all_weights: int  # numbers in the whole model, embedding included, tied ones once
    attention_width: float  # query heads x head size, the mean of keys' and values' where these differ
    cache_width: int  # numbers that one token leaves in the key-value cache of one layer
    windows: tuple[int | None, ...]  # per attention layer: how many tokens back it looks, None for all

    @classmethod
    def of(cls, config: PretrainedConfig, *, trust_remote_code: bool = False) -> ModelCost:
        """Count the weights of the model that this Hugging Face config describes; no memory is used for them."""
        with torch.device("meta"):
            model = model_class(config).from_config(config, trust_remote_code=trust_remote_code)
        return cls.count(model)

    @classmethod
    def count(cls, model: PreTrainedModel) -> ModelCost:
        """Count the weights of a model that is there already (they may be on any device)."""
        config = model.config.get_text_config()
        head = model.get_output_embeddings()
        head_weights = head.weight.numel() if head is not None else 0
        heads = config.num_attention_heads
        of_keys, of_values = head_sizes(config)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(
            body_weights=round(_body_weights(model, head)),
            head_weights=head_weights,
            all_weights=sum(parameter.numel() for parameter in model.parameters()),
            attention_width=heads * (of_keys + of_values) / 2,
            cache_width=kv_heads * (of_keys + of_values),
            windows=_windows(config),
        )

    def with_value_head(self) -> ModelCost:
        """Cost of the critic built on this model: its head has one output."""
        return replace(self, head_weights=0)

    def forward_flops(self, num_tokens: Sequence[int], num_predicted: int) -> float:
        """Operations of a forward pass over sequences of these lengths; `num_predicted` tokens pass the head."""
        dense = 2.0 * (self.body_weights * sum(num_tokens) + self.head_weights * num_predicted)
        return dense + sum(self.attention_flops(length) for length in num_tokens)

    def attention_flops(self, length: int) -> float:
        """Operations of scores and weighted values of one sequence over all layers.

        4 x width for each (query, visible key) pair.
        """
        return 4.0 * self.attention_width * sum(_visible_pairs(length, window) for window in self.windows)

    def row_costs(self, prompt_lengths: Sequence[int], response_lengths: Sequence[int]) -> list[float]:
        """Cost of each row for the balance between ranks: the operations of its forward pass."""
        return [
            self.forward_flops([prompt + response], response)
            for prompt, response in zip(prompt_lengths, response_lengths, strict=True)
        ]

    def cache_reads(self, prompt_length: int, response_length: int) -> float:
        """Numbers that decoding one response reads from the key-value cache, over all layers."""
        total = prompt_length + response_length
        pairs = sum(_visible_pairs(total, w) - _visible_pairs(prompt_length, w) for w in self.windows)
        return self.cache_width * pairs


def head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Sizes of one head's keys (and queries) and of its values.

    Latent attention (DeepSeek) has keys of two parts, of which its head_dim is the rotated one alone.
    """
    if "qk_nope_head_dim" in config:
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size, size


def _visible_pairs(length: int, window: int | None) -> float:
    """Count the (query, key) pairs of causal attention, each query seeing at most `window` keys (itself included)."""
    if window is None or length <= window:
        return length * (length + 1) / 2
    return window * (window + 1) / 2 + float(length - window) * window


def _body_weights(model: PreTrainedModel, head: nn.Module | None) -> float:
    """Count the weights of the blocks' matrices, whatever kind of module holds them.

    Biases of stacked experts and norms of several heads (Cohere) have two axes, and are no matrices.
    Of stacked experts the share that one token visits counts. A vision tower is left out: patches meet it, not tokens.
    """
    config = model.config.get_text_config()
    experts = num_experts(config)
    elsewhere = {head, *(module for part in parts_beside_text(model).values() for module in part.modules())}
    total = 0.0
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module in elsewhere or type(module).__name__.endswith("Norm"):
            continue
        for name, weight in module.named_parameters(recurse=False):
            if name.endswith("bias"):
                continue
            if weight.ndim == 2:
                total += weight.numel()
            elif experts and weight.ndim == 3 and weight.shape[0] == experts:
                total += weight.numel() * config.num_experts_per_tok / experts
    return total


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is None:
        return (window,) * config.num_hidden_layers
    softmax = [kind for kind in kinds if kind.endswith("attention") and kind != "linear_attention"]
    return tuple(window if kind == "sliding_attention" else None for kind in softmax)
