"""Operations and bytes counted from a model's shape, against counts by hand and torch's own flop counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tests.unit.models import tiny_vision, zoo
from verl_like.models.cost import ModelCost, _windows

SMALL = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_qwen2_by_hand():
    cost = ModelCost.of(Qwen2Config(**SMALL, tie_word_embeddings=False))
    block = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96  # q, k and v, o, the three of the MLP
    assert (cost.body_weights, cost.head_weights) == (3 * block, 50 * 64)
    assert (cost.attention_width, cost.cache_width, cost.windows) == (64, 2 * 2 * 16, (None,) * 3)
    pairs = 5 * 6 / 2 + 7 * 8 / 2
    assert cost.forward_flops([5, 7], 4) == 2 * (12 * 3 * block + 4 * 50 * 64) + 4 * 64 * 3 * pairs


@pytest.mark.parametrize("tied", [True, False])
def test_all_weights_counts_tied_ones_once(tied):
    config = Qwen2Config(**SMALL, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    assert ModelCost.of(config).all_weights == sum(p.numel() for p in model.parameters())


def test_agrees_with_torch_flop_counter_but_for_the_causal_half():
    config = Qwen2Config(**SMALL, tie_word_embeddings=False)
    cost = ModelCost.of(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    length = 16
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, length, dtype=torch.long))
    dense = cost.forward_flops([length], length) - cost.attention_flops(length)
    full_square = 4 * cost.attention_width * 3 * length * length  # eager attention computes the masked half too
    by_module = counter.get_flop_counts()
    angles = sum(sum(own.values()) for name, own in by_module.items() if name.endswith(".rotary_emb"))
    # transformers 5.17 computes the rotary embedding's angles by a matrix product, 5.19 no longer
    assert counter.get_total_flops() - angles == pytest.approx(dense + full_square, rel=1e-9)


@pytest.mark.parametrize("name", ["cohere", "deepseek_v3", "gpt_oss", "qwen2_moe"])
def test_norms_of_heads_biases_of_experts_and_latent_attention_agree_with_it_too(name: str) -> None:
    config, length = zoo.config(name, **zoo.telling(name)), 16
    cost, model = ModelCost.of(config), AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if name != "cohere":
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(length)[None])
    dense = cost.forward_flops([length], length) - cost.attention_flops(length)
    full_square = 4 * cost.attention_width * len(cost.windows) * length * length
    assert counter.get_total_flops() == pytest.approx(dense + full_square, rel=1e-9)


def test_a_sliding_window_bounds_the_pairs():
    cost = ModelCost.of(MistralConfig(**SMALL, sliding_window=4))
    seen = sum(min(i, 4) for i in range(1, 11))
    assert cost.attention_flops(10) == 4 * 64 * 3 * seen


def test_linear_attention_has_no_pairs_and_no_cache():
    kinds = ["linear_attention", "full_attention", "linear_attention", "chunked_attention"]
    assert _windows(Qwen2Config(**SMALL | {"num_hidden_layers": 4}, layer_types=kinds)) == (None, None)


def test_windows_of_alternating_layers():
    config = Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=8, layer_types=["sliding_attention"] * 2 + ["full_attention"]
    )
    assert ModelCost.of(config).windows == (8, 8, None)


def test_experts_count_by_the_share_a_token_visits():
    config = Qwen3MoeConfig(
        **SMALL, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1
    )
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    router, experts = 64 * 8, 2 * 3 * 64 * 32
    assert ModelCost.of(config).body_weights == 3 * (attention + router + experts)


def test_shared_experts_count_whole_and_layers_with_state_have_no_pairs():
    config = Qwen2MoeConfig(
        **SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48
    )
    attention, shared = 64 * 64 + 2 * 64 * 32 + 64 * 64, 3 * 64 * 48 + 64  # with the gate of the shared expert
    assert ModelCost.of(config).body_weights == 3 * (attention + 64 * 8 + 2 * 3 * 64 * 32 + shared)
    assert ModelCost.of(zoo.config("jamba")).windows == (None,)


def test_row_costs_grow_faster_than_length():
    cost = ModelCost.of(Qwen2Config(**SMALL))
    short, long = cost.row_costs([10, 10], [100, 10_000])
    assert long > 100 * short * 0.9 and long / short > 10_010 / 110


def test_cache_reads_are_those_of_the_response():
    cost = ModelCost.of(Qwen2Config(**SMALL))
    assert cost.cache_reads(3, 2) == cost.cache_width * 3 * (4 + 5)


def test_a_critic_has_no_vocabulary():
    cost = ModelCost.of(Qwen2Config(**SMALL))
    assert cost.with_value_head().forward_flops([5], 5) == cost.forward_flops([5], 0)


@pytest.mark.parametrize("family", tiny_vision.FAMILIES)
def test_a_vision_tower_is_met_by_patches_not_by_tokens(family: str) -> None:
    """By hand: of each of two layers the matrices of queries and output, keys and values, and the three of the MLP."""
    found = ModelCost.count(tiny_vision.tiny_vision(family))
    assert found.body_weights == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    assert found.head_weights == 80 * 64
