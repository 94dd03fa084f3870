"""Which replicas can share a model's heads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.rollout.tiny import tiny_config
from verl_like.config import RolloutConfig
from verl_like.rollout.build import require_heads

KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"


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
