"""Which replicas can share a model's heads, and which models an engine runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.models import zoo
from tests.unit.rollout.tiny import tiny_config
from verl_like.config import RolloutConfig
from verl_like.plugins.vllm.models import missing_fields
from verl_like.rollout.build import require_heads, require_model

KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"


SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("name", "device", "heads", "kept", "size", "message"),
    [
        ("vllm", "cpu", 2, 1, 2, ""),  # both ranks hold the one
        ("vllm", "cpu", 8, 2, 4, ""),
        ("sglang", "cuda", 2, 1, 2, ""),
        ("sglang", "cpu", 4, 2, 2, ""),
        ("sglang", "cpu", 3, 1, 1, ""),
        ("vllm", "cuda", 6, 3, 2, r"=2 neither divides the model's 3 key-value heads nor .*; use one of \[1, 3, 6\]"),
        ("vllm", "cuda", 14, 2, 4, r"=4 does not divide the model's 14 attention heads; use one of \[1, 2, 14\]"),
        ("sglang", "cpu", 2, 1, 2, r"=2 does not divide the model's 1 key-value heads: .* proved; use one of \[1\]"),
        ("sglang", "cpu", 6, 3, 6, r"=6 does not divide the model's 3 key-value heads: .*; use one of \[1, 3\]"),
    ],
)
def test_heads_that_ranks_cannot_share(name: Any, device: str, heads: int, kept: int, size: int, message: str) -> None:
    config = tiny_config(num_attention_heads=heads, num_key_value_heads=kept)
    rollout = RolloutConfig(name=name, tensor_model_parallel_size=size)
    if not message:
        require_heads(rollout, config, device)
        return
    with pytest.raises(ValueError, match=KEY + message):
        require_heads(rollout, config, device)


WIDE = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}


@pytest.mark.parametrize(
    ("model", "changes", "rollout", "device", "message"),
    [
        ("qwen3_next", WIDE, {"dtype": "bfloat16"}, "cpu", ""),
        ("qwen3_next", {}, {}, "cuda", ""),
        ("qwen3_next", {}, {"name": "hf"}, "cpu", ""),
        ("gpt_oss", {}, {}, "cuda", ""),
        ("qwen3", {}, {}, "cpu", ""),
        (
            "qwen3_next",
            WIDE,
            {},
            "cpu",
            r"dtype=auto with name=vllm .*'qwen3_next' in bfloat16 alone; set",
        ),
        (
            "qwen3_5_text",
            {},
            {"dtype": "bfloat16"},
            "cpu",
            r"name=vllm .* 64 or 128, .*linear_key_head_dim=16 and",
        ),
        ("granitemoehybrid", {}, {}, "cpu", ""),  # transformers calls its Mamba layers linear attention as well
        ("gpt_oss", {}, {}, "cpu", r"name=vllm on device cpu, .*'gpt_oss': .* no kernel for its experts; set name=hf"),
        ("cohere2", {"sliding_window": 63}, {}, "cuda", r"name=vllm on device cuda, .*'cohere2': .*a token longer"),
        ("cohere2", {"sliding_window": 64}, {}, "cuda", ""),
        ("qwen2_moe", SOME_WINDOWS, {}, "cuda", r"name=vllm with .*'qwen2_moe', some .* in all layers or in none; set"),
        ("qwen2_moe", SOME_WINDOWS | {"layer_types": ["sliding_attention"] * 2}, {}, "cuda", ""),
        ("qwen2_moe", SOME_WINDOWS | {"sliding_window": 64}, {}, "cuda", ""),  # as long as the longest row
    ],
)
def test_models_that_vllm_cannot_run(
    model: str, changes: dict[str, Any], rollout: dict[str, Any], device: str, message: str
) -> None:
    asked = RolloutConfig(**{"name": "vllm", **rollout})
    if not message:
        require_model(asked, zoo.config(model, **changes), device, 64)
        return
    with pytest.raises(ValueError, match=rf"actor_rollout_ref\.rollout\.{message}"):
        require_model(asked, zoo.config(model, **changes), device, 64)


def test_fields_that_vllm_reads_and_folders_of_transformers_lack() -> None:
    assert missing_fields(zoo.config("lfm2")) == {"conv_dim": 64, "block_dim": 64}
    assert missing_fields(zoo.config("lfm2", conv_dim=96)) == {"block_dim": 64}
    assert missing_fields(zoo.config("deepseek_v3")) == {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    assert missing_fields(zoo.config("qwen3")) == {}


@pytest.mark.parametrize(
    ("model", "changes", "device", "length", "message"),
    [
        ("mistral", {"sliding_window": 8}, "cuda", 8, ""),
        ("mistral", {"sliding_window": 8}, "cuda", 9, "sliding_window=8 is less than the longest row of 9 tokens"),
        ("mistral", {"sliding_window": None}, "cpu", 64, ""),
        ("qwen2", {"layer_types": None, "use_sliding_window": False}, "cpu", 64, ""),
        ("qwen2", {}, "cpu", 64, "SGLang.s model of it has no windows; set name=vllm or hf"),
        ("phi3", {"sliding_window": 16}, "cpu", 64, "sliding_window=16 is less than"),
        ("qwen3_next", {}, "cuda", 64, ""),  # layers without any window
        ("gemma3_text", {}, "cpu", 64, ""),  # SGLang's model of it has its windows
        ("olmoe", {}, "cpu", 64, "SGLang refuses its norm of fewer key heads; set name=hf"),
        ("olmoe", {}, "cuda", 64, ""),
        ("olmo", {"num_attention_heads": 4, "num_key_value_heads": 2}, "cuda", 64, "has 4 heads of keys, and this one"),
        ("olmo", {"num_attention_heads": 4, "num_key_value_heads": 4}, "cpu", 64, ""),
    ],
)
def test_models_that_sglang_cannot_run(
    model: str, changes: dict[str, Any], device: str, length: int, message: str
) -> None:
    asked = RolloutConfig(name="sglang")
    if not message:
        require_model(asked, zoo.config(model, **changes), device, length)
        return
    with pytest.raises(ValueError, match=message):
        require_model(asked, zoo.config(model, **changes), device, length)
