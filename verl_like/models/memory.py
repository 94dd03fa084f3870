"""Memory that one rank needs for a model, from its shape: what autograd keeps, weights, gradients, states, the head.

Pure arithmetic. Activations are those that the engine really keeps for a decoder of RMSNorms, rotary attention and
gated MLPs (Qwen2, Qwen3, Llama; others are close to it); tests compare them with torch's saved tensors, and
docs/gpu_sizing.md shows measured peaks beside them. Sizes are bytes, `c` is the size of a number in the precision of
the forward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from transformers import PretrainedConfig

from verl_like.models.cost import ModelCost, head_sizes
from verl_like.models.families import num_experts
from verl_like.models.fused_linear import CHUNK_ELEMENTS, KEEP_ELEMENTS

Recompute = Literal["none", "selective", "full"]

_WIDE = 4  # a float32 number: norms, log-probs, the head's logits
_INDEX = 8  # a token id, a position
_BLOCK = 64  # [tokens] of queries at a time in models/attention_groups.py
_PRODUCTS_LENGTH = 512  # [tokens] of a row up to which a CPU keeps attention weights (models/attention_groups.py)
# Copies of a chunk of the head's logits alive at once in a backward pass (models/fused_linear.py), on a CPU with what
# products of another precision are cast to. A forward pass has one, and one for the entropy's terms.
_CHUNK_COPIES, _CPU_CHUNK_COPIES = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes that a decoder's memory depends on.

    inner: width of the MLP, of all experts that one token visits together.
    expert_weights: of all routed experts of a layer; chosen: experts among them that a token visits.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    normed_heads: bool  # queries and keys pass norms of their own
    all_weights: int
    root_weights: int  # embedding, final norm and head: FSDP's root unit
    tied: bool
    expert_weights: int = 0
    chosen: int = 0

    @classmethod
    def of(cls, config: PretrainedConfig, cost: ModelCost) -> Shape:
        """Read the sizes from a Hugging Face config, and from the weights counted in its model."""
        text = config.get_text_config()
        hidden, heads = text.hidden_size, text.num_attention_heads
        inner, expert_weights = getattr(text, "intermediate_size", None) or 4 * hidden, 0
        if num_experts(text):
            expert_weights = 3 * hidden * num_experts(text) * (getattr(text, "moe_intermediate_size", None) or inner)
            inner = (getattr(text, "moe_intermediate_size", None) or inner) * text.num_experts_per_tok
            inner += getattr(text, "shared_expert_intermediate_size", None) or 0
        embedding = text.vocab_size * hidden
        tied = bool(config.tie_word_embeddings) or not cost.head_weights
        return cls(
            hidden=hidden,
            layers=text.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_size=math.ceil(sum(head_sizes(text)) / 2),  # queries, keys, values and results: both as often
            inner=inner,
            vocab=text.vocab_size,
            normed_heads=text.model_type.startswith(("qwen3", "gemma3", "olmo2")),
            all_weights=cost.all_weights,
            root_weights=embedding * (1 if tied else 2) + hidden,
            tied=tied,
            expert_weights=expert_weights,
            chosen=text.num_experts_per_tok if expert_weights else 0,
        )

    @property
    def queries(self) -> int:
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def layer_weights(self) -> float:
        """Weights of one layer, the unit that FSDP gathers."""
        return (self.all_weights - self.root_weights) / self.layers

    def stage(self, count: int) -> Shape:
        """Shape of the largest of `count` stages: as many layers as any has, and one of embedding and head."""
        if count == 1:
            return self
        layers, root = -(-self.layers // count), self.vocab * self.hidden + self.hidden
        weights = round(layers * self.layer_weights) + root
        return replace(self, layers=layers, all_weights=weights, root_weights=root)

    def lora_weights(self, rank: int) -> int:
        """Weights of adapters of this rank on every linear layer (target_modules=all-linear)."""
        q, k, h, i = self.queries, self.keys, self.hidden, self.inner
        return self.layers * rank * (2 * (h + q) + 2 * (h + k) + 3 * (h + i))


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Options of the forward and backward passes that their memory depends on."""

    c: int  # bytes of a number
    recompute: Recompute = "full"
    on_cpu: bool = False
    lean_norms: bool = False  # models/lean_ops.py, or Liger's: the input and one number a row are kept
    fused_head: bool = True
    lora: bool = False
    context: int = 1  # ranks that share a row by chunks: each keeps the keys of all that its tokens see


def layer_bytes(shape: Shape, path: Path, row: int) -> float:
    """Bytes that one layer keeps of one token for its backward pass, in rows of `row` tokens."""
    c, q, k = path.c, shape.queries, shape.keys
    norms = 2 * _norm_bytes(path, shape.hidden, 1) + 2 * c * shape.hidden  # and what they give, to matrix products
    if shape.normed_heads:
        norms += _norm_bytes(path, q + k, shape.heads + shape.kv_heads)
    rotary = c * shape.head_size if path.on_cpu and path.lean_norms else 0
    return norms + rotary + _attention_bytes(shape, path, row) + 4 * c * shape.inner


def _norm_bytes(path: Path, width: int, rows: int) -> float:
    """Bytes of a norm: its input (float32, unless the gradient is by hand), the normalised value, a number a row."""
    return _WIDE * rows + (path.c * width if path.lean_norms else (_WIDE + path.c) * width)


def _attention_bytes(shape: Shape, path: Path, row: int) -> float:
    """Bytes of queries, keys, values and the result; weights of blocks or the softmax's normaliser."""
    c, q, k = path.c, shape.queries, shape.keys * path.context
    if not path.on_cpu:
        return c * (2 * q + 2 * k) + _WIDE * shape.heads
    if row <= _PRODUCTS_LENGTH:
        block = row / max(1, round(row / _BLOCK))
        return c * (2 * q + 2 * k + shape.heads * (row + block) / 2)
    return _WIDE * (2 * q + 2 * k + shape.heads) + c * q


def activation_bytes(shape: Shape, path: Path, tokens: int, row: int, predicted: int | None = None) -> float:
    """Bytes that a micro-batch keeps between forward and backward pass; without a backward pass none are kept.

    With recomputation the layer at work has `recomputed_bytes` besides.

    Args:
        shape: sizes of the model.
        path: options of the passes.
        tokens: tokens of the micro-batch.
        row: length of its rows.
        predicted: tokens that pass the head; None: all.
    """
    c, predicted = path.c, tokens if predicted is None else predicted
    kept = {
        "none": layer_bytes(shape, path, row),
        "full": c * shape.hidden,
        "selective": c * shape.hidden + _products_bytes(shape, path, row),
    }[path.recompute]
    ends = _norm_bytes(path, shape.hidden, 1) + _INDEX  # the final norm; token ids
    if path.recompute == "none" and path.on_cpu:
        ends += 2 * c * shape.head_size  # cos, sin
    return tokens * (shape.layers * kept + ends) + predicted * _head_bytes(shape, path, predicted)


def recomputed_bytes(shape: Shape, path: Path, tokens: int, row: int) -> float:
    """Bytes that the layer at work computes again in the backward pass."""
    if path.recompute == "none":
        return 0.0
    kept = _products_bytes(shape, path, row) if path.recompute == "selective" and not path.on_cpu else 0.0
    return tokens * (layer_bytes(shape, path, row) - kept)


def _products_bytes(shape: Shape, path: Path, row: int) -> float:
    """Bytes of a layer's matrix products and its attention, which selective recomputation keeps."""
    c, q, k = path.c, shape.queries, shape.keys
    weights = 0.0
    if path.on_cpu and row <= _PRODUCTS_LENGTH:
        weights = c * shape.heads * (row + _BLOCK) / 2
    return c * (2 * q + 2 * k + 2 * shape.hidden + 2 * shape.inner) + weights + _WIDE * shape.heads


def _head_bytes(shape: Shape, path: Path, tokens: int) -> float:
    """Bytes of one predicted token: its hidden state and a few numbers.

    Where log-probs of the vocabulary are kept, these too.
    """
    small = path.c * shape.hidden + 2 * _INDEX + 3 * _WIDE
    if not path.fused_head:
        return small + shape.vocab * (2 * _WIDE + path.c)
    return small + (_WIDE * shape.vocab if tokens * shape.vocab <= KEEP_ELEMENTS else 0)


def head_work_bytes(shape: Shape, path: Path, tokens: int, *, backward: bool, entropy: bool = True) -> float:
    """Bytes that the output head needs while it works: chunks of logits, gradients of its weight and of its input.

    entropy: wanted beside the log-probs.
    """
    logits, copies = tokens * shape.vocab, 2 if entropy or path.on_cpu else 1
    if backward:
        copies = _CPU_CHUNK_COPIES if path.on_cpu else _CHUNK_COPIES
    chunk = _WIDE * copies * min(CHUNK_ELEMENTS, logits)
    if not path.fused_head:
        chunk = _WIDE * (3 if backward else 2) * logits
    if not backward:
        return chunk
    weight = 0 if path.lora else shape.vocab * shape.hidden
    if not path.on_cpu:  # its gradient is summed up wide, and narrowed when the chunks are gone
        chunk = max(chunk, path.c * weight)
    return chunk + _WIDE * weight + path.c * tokens * shape.hidden


def layer_work_bytes(shape: Shape, path: Path, tokens: int, *, backward: bool) -> float:
    """Bytes of one layer's temporaries: on a CPU gradients of the MLP's tensors and of the residual.

    Without a gradient the MLP's tensors alone, on a GPU too.
    """
    wide = (_WIDE if not path.lean_norms else path.c) * shape.hidden
    if backward:
        return tokens * (path.c * 3 * shape.inner + 2 * path.c * shape.hidden + wide)
    return tokens * (path.c * (3 * shape.inner + 3 * shape.hidden) + wide)


def late_bytes(shape: Shape, path: Path) -> float:
    """Bytes of one token that a layer keeps until its weights' pass, where that is apart from the backward pass.

    Inputs of linear layers and gradients of their outputs; those of stacked experts are not among them.
    """
    mlp = shape.hidden if shape.chosen else 2 * shape.hidden + 3 * shape.inner  # of a mixture the router's input
    return path.c * (2 * shape.hidden + 2 * shape.queries + 2 * shape.keys + mlp)


def layer_gradient_bytes(shape: Shape, path: Path, tokens: int, weights: float, experts: float) -> float:
    """Bytes that a layer needs at most on a GPU for its gradients, beside what is kept of it or computed again.

    First in the MLP, when what its last product was given is gone: gradients of three of its tensors, of the residual
    and of the last product's weights. Then in attention, when the MLP's tensors are gone and its weights' gradients are
    there; or at a mixture's first products, with copies of the tokens for their experts and their gradients.

    weights, experts: numbers of the layer's gradients that this rank has, and those of experts among them.
    """
    inner, hidden = tokens * shape.inner, tokens * shape.hidden
    last_product = experts / 3 or min(weights, shape.hidden * shape.inner)
    attention = 2 * tokens * (shape.queries + shape.keys) + weights - 4 * inner
    mixture = experts + 2 * hidden * shape.chosen - 2 * inner
    return path.c * (hidden + max(2 * inner + last_product, attention, mixture))


def cache_token_bytes(shape: Shape, number_bytes: int) -> float:
    """Bytes that one token leaves in the key-value cache over all layers."""
    return 2.0 * number_bytes * shape.keys * shape.layers
