"""A tiny model of every type in verl_like/models/families.py, with random weights, from its config alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PretrainedConfig,
)

VOCAB = 61
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # those of mixtures of experts, under the names of all families
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_OWN: dict[str, dict[str, Any]] = {
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "mistral": {"sliding_window": 5},
    "ministral": _WINDOWS,
    "mixtral": {"sliding_window": 5},
    "gemma2": _WINDOWS | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "vaultgemma": _WINDOWS
    | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gemma3_text": _WINDOWS | {"query_pre_attn_scalar": 16},
    "cohere2": _WINDOWS,
    "olmo3": _WINDOWS,
    "exaone4": _WINDOWS,
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gpt_oss": _WINDOWS,
    "qwen3_next": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64, "mamba_n_heads": 4},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "glm4_moe": {"n_routed_experts": 8, "n_shared_experts": 1, "head_dim": 32},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 64},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [1],
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "chunk_size": 8,
        "num_mem_blocks": 1,
    },
}

# Values with which nothing in a layer does nothing, by family: a multiplier of 1, a bias or a norm that is left out, a
# rotation that is never stretched would hide that it is forgotten. Rows must have more than 16 tokens.
_TIED = {"tie_word_embeddings": True, "hidden_act": "gelu"}
_PLAIN = _TIED | {"rms_norm_eps": 0.05, "attention_bias": True}
_STRETCHED = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.5,
    }
}
_IN_PART = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
LONGROPE = _IN_PART["rope_parameters"] | {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
_MULTIPLIED = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
}
_GROUPS = {
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
_OF_MAMBA = {
    "rms_norm_eps": 0.05,
    "mamba_n_groups": 2,
    "mamba_proj_bias": True,
    "mamba_d_conv": 3,
    "time_step_limit": [0.01, 0.9],
}
_CHOICE = {"num_experts_per_tok": 3, "norm_topk_prob": True}
_SPARSE = {"num_hidden_layers": 4, "mlp_only_layers": [0], "decoder_sparse_step": 2}
_OF_DELTA = _IN_PART | {"linear_conv_kernel_dim": 3}
_SHARP = {"layer_norm_eps": 0.05, "norm_eps": 0.05, "norm_epsilon": 0.05}
_TELLING: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("qwen2", "qwen3", "mistral", "ministral3", "gemma", "olmo2", "olmo3", "hunyuan_v1_dense", "mixtral"),
        _PLAIN | _STRETCHED,
    ),
    **dict.fromkeys(("llama", "smollm3", "arcee"), _PLAIN | _STRETCHED | {"mlp_bias": True}),
    **dict.fromkeys(("gemma2", "vaultgemma"), _PLAIN | _STRETCHED | {"hidden_activation": "silu"}),
    **dict.fromkeys(("ministral", "exaone4"), _PLAIN | _STRETCHED),
    "gemma3_text": _PLAIN
    | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
    | {"rope_parameters": {"sliding_attention": _IN_PART["rope_parameters"] | {"partial_rotary_factor": 1.0}}}
    | {"hidden_activation": "silu"},
    "cohere": _PLAIN | _SHARP | _STRETCHED | {"logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": _PLAIN | _SHARP | _STRETCHED | {"logit_scale": 0.3},
    "olmo": _PLAIN | _STRETCHED | {"clip_qkv": 0.5},
    "phi": _SHARP | _IN_PART | {"qk_layernorm": True, "hidden_act": "silu"},
    "phi3": _PLAIN | {"sliding_window": 5, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    "granite": _PLAIN | _STRETCHED | _MULTIPLIED | {"mlp_bias": True},
    **dict.fromkeys(("glm", "glm4"), _PLAIN | _IN_PART),
    "starcoder2": _SHARP | _STRETCHED | {"sliding_window": 5, "hidden_act": "silu", "tie_word_embeddings": True},
    "seed_oss": _PLAIN | _STRETCHED | {"attention_out_bias": True, "mlp_bias": True},
    "ernie4_5": _PLAIN | _STRETCHED | {"use_bias": True},
    "gpt_neox": _SHARP | _IN_PART | {"use_parallel_residual": False, "hidden_act": "silu"},
    "stablelm": _PLAIN | _SHARP | _IN_PART | {"use_parallel_residual": True, "use_qkv_bias": True}
    | {"qk_layernorm": True},
    "nemotron": _PLAIN | _SHARP | _IN_PART | {"mlp_bias": True, "hidden_act": "silu"},
    "qwen2_moe": _PLAIN | _STRETCHED | _CHOICE | _SPARSE | {"use_sliding_window": True, "sliding_window": 5}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen3_moe": _PLAIN | _STRETCHED | _CHOICE | _SPARSE | {"use_sliding_window": True, "sliding_window": 5},
    "olmoe": _PLAIN | _STRETCHED | _CHOICE | {"clip_qkv": 0.5},
    "granitemoe": _PLAIN | _STRETCHED | _MULTIPLIED | _CHOICE,
    "flex_olmo": _PLAIN | _STRETCHED | _CHOICE,
    "hunyuan_v1_moe": _PLAIN | _STRETCHED | {"moe_topk": 3},
    "deepseek_v3": _PLAIN | _STRETCHED | _GROUPS,
    "glm4_moe": _PLAIN | _IN_PART | _GROUPS | {"use_qk_norm": True},
    "dots1": _PLAIN | _STRETCHED | _GROUPS | {"sliding_window": 5}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "minimax_m2": _PLAIN | _IN_PART | {"num_experts_per_tok": 3},
    "gpt_oss": _PLAIN | _STRETCHED | _CHOICE | {"swiglu_alpha": 1.1, "swiglu_limit": 0.5},
    "lfm2_moe": _SHARP | _STRETCHED | _CHOICE | {"conv_bias": True, "conv_L_cache": 4, "routed_scaling_factor": 1.7}
    | {"num_hidden_layers": 3, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2": _SHARP | _STRETCHED | {"conv_bias": True, "conv_L_cache": 4},
    "qwen3_next": _PLAIN | _OF_DELTA | _CHOICE | {"mlp_only_layers": [0]},
    "qwen3_5_text": _PLAIN | _OF_DELTA,
    "qwen3_5_moe_text": _PLAIN | _OF_DELTA | {"num_experts_per_tok": 3},
    "jamba": {"tie_word_embeddings": True, "mamba_proj_bias": True, "mamba_d_conv": 3, "mamba_dt_rank": 5},
    "bamba": _PLAIN | _OF_MAMBA | {"mlp_bias": True, "hidden_act": "silu"},
    "granitemoehybrid": _PLAIN | _OF_MAMBA | _MULTIPLIED | _STRETCHED | {"position_embedding_type": "rope"},
    "falcon_h1": _PLAIN | _OF_MAMBA | _STRETCHED | {
        "mlp_bias": True,
        "projectors_bias": True,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.3,
        "mlp_multipliers": [0.7, 0.3],
        "key_multiplier": 0.4,
        "attention_out_multiplier": 0.7,
        "attention_in_multiplier": 1.3,
        "ssm_multipliers": [0.3, 0.25, 0.5, 0.7, 0.4],
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.3,
    },
}  # fmt: skip


def telling(model_type: str) -> dict[str, Any]:
    """Changes of `config` with which nothing in a layer does nothing."""
    known = set(AutoConfig.for_model(model_type).to_dict())
    found = {name: value for name, value in _TELLING[model_type].items() if name in known}
    return copy.deepcopy(found)  # configs write into what they are given


def scatter(hf: nn.Module) -> None:
    """Move norms and biases away from ones and zeros, in place."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if weight.ndim == 1 or name.endswith("bias"):
                weight += 0.3 * torch.randn(weight.shape, generator=generator)


def config(model_type: str, **changes: Any) -> PretrainedConfig:
    """Names a family does not have are left out; what only it has is set."""
    default = AutoConfig.for_model(model_type)
    known = set(default.to_dict()) | set(default.attribute_map)
    shape = {name: value for name, value in _SHAPE.items() if name in known}
    return AutoConfig.for_model(model_type, **(shape | _OWN.get(model_type, {}) | changes))


def folder(path: Path, model_type: str, **changes: Any) -> str:
    """A folder with the config alone. vLLM wants to know the class."""
    if model_type in _TOWERS:
        return _nested_folder(path, model_type)
    target, chosen = path / model_type, config(model_type, **changes)
    chosen.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(chosen)].__name__]
    chosen.save_pretrained(target)
    return str(target)


_QWEN_TOWER = {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
_TOWER = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_5": _QWEN_TOWER,
    "qwen3_5_moe": _QWEN_TOWER,
    "qwen3_vl_moe": _QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    "gemma3": _TOWER,
    "mistral3": _TOWER | {"head_dim": 16},
}


def _nested_folder(path: Path, model_type: str) -> str:
    """A folder with the config of a text model beside a tower of images."""
    default = AutoConfig.for_model(model_type)
    text: PretrainedConfig = default.get_text_config()
    known = set(text.to_dict()) | set(text.attribute_map)
    shape = {name: value for name, value in _SHAPE.items() if name in known}
    narrow = {"moe_intermediate_size": 24} if "moe_intermediate_size" in known else {}  # no square stack of experts
    tower = {"model_type": default.vision_config.model_type, "hidden_size": 32, "intermediate_size": 48}
    chosen = AutoConfig.for_model(
        model_type,
        text_config=shape | narrow | _OWN.get(text.model_type, {}) | {"model_type": text.model_type},
        vision_config=tower | _TOWERS[model_type],
        tie_word_embeddings=False,
    )
    chosen.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(chosen)].__name__]
    chosen.save_pretrained(path / model_type)
    return str(path / model_type)
