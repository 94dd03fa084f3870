"""Model types as vLLM (0.32) knows them: what its CPU build lacks, and what it reads of a config that may not be there.

docs/models.md says what was run; tests write its table from what is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from verl_like.config import RolloutConfig

# Types that it cannot run, or whose log-probs are not the trainer's, on any device
NOWHERE: dict[str, str] = {
    "bamba": "vLLM has no model of it any more",
}
# The same of its CPU build; cohere2 with rows longer than its window on any device
NOT_ON_CPU: dict[str, str] = NOWHERE | {
    "cohere2": "vLLM's window is a token longer than transformers'",
    "phi": "vLLM's head has no bias",
    "gpt_neox": "vLLM's CPU build crashes: its attention takes no slices of fused queries, keys and values",
    "gpt_oss": "vLLM's CPU build has no kernel for its experts",
    "jamba": "vLLM's CPU build has no kernel for Mamba 1",
    "minimax_m2": "vLLM's CPU build has no routers with sigmoid scores of its kind",
    "qwen3_5_moe_text": "in bfloat16, its only type there, log-probs of samples are 0.08 off, 2.2 times what hf's are",
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe", "qwen3_vl_moe", "gemma3", "mistral3"),
        "vLLM asks for torchvision, which it lacks on a CPU",
    ),
}
# Fields that it reads and transformers' class does not have: files on the hub do, folders that transformers made do not
_FIELDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "lfm2": lambda config: {"conv_dim": config.hidden_size, "block_dim": config.hidden_size},
    "deepseek_v3": lambda config: {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
_ALL_OR_NONE = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")  # whose layers all have a window there, or none
_DELTA_HEADS = (64, 128)  # sizes that its CPU kernel of the delta rule is made for


def require_model(rollout: RolloutConfig, config: PretrainedConfig, device_type: str, max_model_len: int) -> None:
    """Check that vLLM can run a model of this type on this device.

    max_model_len: tokens of the longest row. Raises ValueError, naming key and fix, otherwise.
    """
    name, section, text = config.model_type, "actor_rollout_ref.rollout", config.get_text_config()
    cut = name == "cohere2" and text.sliding_window < max_model_len
    if (why := (NOT_ON_CPU if device_type == "cpu" or cut else NOWHERE).get(name)) is not None:
        raise ValueError(
            f"{section}.name=vllm on device {device_type}, with a model of type {name!r}: {why}; set name=hf"
        )
    some = name in _ALL_OR_NONE and len(set(getattr(text, "layer_types", None) or ())) > 1
    # Its mixtures leave the windows out then; the others end the start
    if some and (not name.endswith("_moe") or text.sliding_window < max_model_len):
        raise ValueError(
            f"{section}.name=vllm with a model of type {name!r}, some of whose layers have a sliding window: vLLM's "
            "model of it has windows in all layers or in none; set name=hf"
        )
    # Layers of Mamba are called linear attention as well
    if device_type != "cpu" or getattr(text, "linear_key_head_dim", None) is None:
        return
    if rollout.dtype != "bfloat16":
        raise ValueError(
            f"{section}.dtype={rollout.dtype} with name=vllm on device cpu: vLLM's CPU build computes the delta rule "
            f"of a model of type {name!r} in bfloat16 alone; set dtype=bfloat16, or name=hf"
        )
    sizes = text.linear_key_head_dim, text.linear_value_head_dim
    if sizes[0] not in _DELTA_HEADS or sizes[1] != sizes[0]:
        raise ValueError(
            f"{section}.name=vllm on device cpu: vLLM's kernel for the delta rule takes keys and values of one size, "
            f"{' or '.join(map(str, _DELTA_HEADS))}, and this model of type {name!r} has "
            f"linear_key_head_dim={sizes[0]} and linear_value_head_dim={sizes[1]}; set name=hf"
        )


def missing_fields(config: PretrainedConfig) -> dict[str, Any]:
    """List what vLLM must be told of a model beside its config.json, by field: what transformers computes by."""
    fields, known = _FIELDS.get(config.model_type), config.to_dict()
    return {} if fields is None else {name: value for name, value in fields(config).items() if name not in known}
