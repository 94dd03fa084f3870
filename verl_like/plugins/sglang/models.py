"""Model types as SGLang (0.5.23) knows them: what it cannot run on a CPU, and whose windows it leaves out.

docs/models.md says what was run; tests write its table from what is here. Imports nothing of SGLang.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from verl_like.config import RolloutConfig
from verl_like.rollout.hf_cache import new_cache

# Types that it cannot run on a CPU, or whose log-probs are not the trainer's there
NOT_ON_CPU: dict[str, str] = {
    **dict.fromkeys(("gpt_oss", "exaone4"), "SGLang's model of it takes no attention that a CPU has"),
    "olmo3": "its log-probs in SGLang are others (by 1 nat), though all weights are right",
    "gemma": "SGLang holds its norms with one added",
    "gemma2": "SGLang reads a field (hidden_act) that its config does not have",
    "glm": "SGLang runs transformers' model of it, whose tensor-parallel plan it does not know",
    "hunyuan_v1_dense": "SGLang does not take the names of its norms",
    "nemotron": "SGLang falls over the first step of it",
    "granitemoe": "SGLang gives its log-probs, but its routers cannot be read back",
    "qwen2_moe": "SGLang's model of it needs Triton",
    "olmoe": "SGLang refuses its norm of fewer key heads",
    "lfm2": "SGLang has its convolution for devices alone",
}
WITH_ALL_HEADS = ("olmo", "phi", "gpt_neox")  # its models of these keep as many heads of keys as of queries
# Its models of these attend to all tokens, on every device, whatever window the config has
WITHOUT_WINDOWS = ("mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2")


def require_model(rollout: RolloutConfig, config: PretrainedConfig, device_type: str, max_model_len: int) -> None:
    """Check that SGLang computes what the trainer computes, for a model of this type.

    max_model_len: tokens of the longest row. Raises ValueError, naming key and fix, otherwise.
    """
    name, text = config.model_type, config.get_text_config()
    section, kept = "actor_rollout_ref.rollout.name=sglang", getattr(text, "num_key_value_heads", None)
    if device_type == "cpu" and (problem := NOT_ON_CPU.get(name)) is not None:
        raise ValueError(f"{section} on device cpu, with a model of type {name!r}: {problem}; set name=hf")
    if name in WITH_ALL_HEADS and kept not in (None, text.num_attention_heads):
        raise ValueError(
            f"{section} with a model of type {name!r}: SGLang's model of it has {text.num_attention_heads} heads of "
            f"keys, and this one has {kept}; set name=hf"
        )
    if text.model_type not in WITHOUT_WINDOWS:
        return
    windows = [layer.sliding_window for layer in new_cache(text).layers if layer.is_sliding]
    if windows and min(windows) < max_model_len:
        raise ValueError(
            f"{section} with a model of type {name!r}, whose sliding_window={min(windows)} "
            f"is less than the longest row of {max_model_len} tokens: SGLang's model of it has no windows; set "
            "name=vllm or hf, or data.max_prompt_length + data.max_response_length (rollout.max_model_len) to it"
        )
