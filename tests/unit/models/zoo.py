"""A tiny model of every type in verl_like/models/families.py, with random weights, from its config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
