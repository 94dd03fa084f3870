"""Bytes that one rank needs, from a model's shape: estimates for choosing budgets, offload and the number of GPUs.

Activations are those that transformers' decoder layers (RMSNorm, gated MLP) keep for the backward pass in a 16-bit
format with an attention kernel that keeps no scores; tests compare them with what autograd really keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_like.bench.shapes import ModelShape, Workload
from verl_like.models.cost import ModelCost
from verl_like.models.fused_linear import CHUNK_ELEMENTS

_MASTER = 4  # bytes of a master weight and of its gradient, float32
_STATES = 8  # AdamW's two float32 states
_COMPUTE = 2  # bfloat16
_CHUNKS_ALIVE = 3  # of the head's logits, float32


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes of one rank. `gathered`: bfloat16 copies of the units at work and their gradients."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    head: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations + self.head


def training_memory(
    shape: ModelShape, cost: ModelCost, *, ranks: int, micro_batch_tokens: int, checkpointing: bool
) -> TrainingMemory:
    """AdamW with float32 master weights, bfloat16 compute, sharded over `ranks`."""
    layer = cost.body_weights / shape.num_layers
    root = cost.all_weights - cost.body_weights
    kept = layer_bytes(shape) * (1 if checkpointing else shape.num_layers)
    inputs = _COMPUTE * shape.hidden_size * shape.num_layers if checkpointing else 0
    chunk = min(CHUNK_ELEMENTS, micro_batch_tokens * shape.vocab_size)
    return TrainingMemory(
        weights=_MASTER * cost.all_weights / ranks,
        gradients=_MASTER * cost.all_weights / ranks,
        optimizer=_STATES * cost.all_weights / ranks,
        gathered=_COMPUTE * ((root + 2 * layer) + (root + layer)),
        activations=float(micro_batch_tokens) * (inputs + kept),
        head=4.0 * (_CHUNKS_ALIVE * chunk + cost.head_weights),
    )


def layer_bytes(shape: ModelShape) -> float:
    """What one layer keeps of one token for its backward pass.

    Each of two norms: its input in float32, the normalised value, its output (4 + 2 + 2 bytes x hidden). Attention:
    queries, keys, values and its output. MLP: gate, its activation, up, their product.
    """
    size = shape.hidden_size // shape.num_heads
    attention = 2 * shape.num_heads * size + 2 * shape.num_kv_heads * size
    return 2 * 8 * shape.hidden_size + _COMPUTE * (attention + 4 * shape.intermediate_size)


def cache_bytes(cost: ModelCost, workload: Workload, responses: list[int]) -> float:
    """Key-value cache of a whole step's responses at their full lengths, each prompt once."""
    tokens = workload.num_prompts * workload.prompt_length + sum(responses)
    return float(_COMPUTE * cost.cache_width * len(cost.windows) * tokens)
