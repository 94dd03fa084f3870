"""The hf engine's own decode step computes transformers' logits and cache, from the parameters as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from verl_like.models import lora
from verl_like.rollout import hf_cache
from verl_like.rollout.hf_decode import LeanDecoder

SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, rope_parameters=YARN),
}


def built(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    hf_cache.register()
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=dtype, attn_implementation=hf_cache.ATTENTION_NAME
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.bfloat16, 0.25)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, dtype: torch.dtype, atol: float) -> None:
    model = built(FAMILIES[family], dtype)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    lean = LeanDecoder.of(model)
    assert lean is not None
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        parameter.mul_(1.1)  # what is loaded later is what it computes with
    mask_bS = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    length_b1, ids_bS = mask_bS.sum(1, keepdim=True), torch.arange(15).view(3, 5)
    caches = [hf_cache.new_cache(model.config) for _ in range(2)]
    for cache in caches:
        positions_bS = (mask_bS.cumsum(1) - 1).clamp(min=0)
        model(ids_bS, attention_mask=mask_bS, position_ids=positions_bS, past_key_values=cache)
    for step in range(3):
        mask_bS = torch.nn.functional.pad(mask_bS, (0, 1), value=1)
        ids_b1, at_b1 = torch.tensor([[7], [20], [33]]) + step, length_b1 + step
        seen = {"attention_mask": mask_bS, "position_ids": at_b1, "past_key_values": caches[0]}
        expected, found = model(ids_b1, **seen).logits, lean.logits(ids_b1, at_b1, mask_bS, caches[1])
        assert found.shape == expected.shape == (3, 1, 61) and expected.float().std() > 0.5
        torch.testing.assert_close(found, expected, rtol=0.0 if dtype == torch.float32 else 0.05, atol=atol)
    for mine, usual in zip(caches[1].layers, caches[0].layers, strict=True):
        torch.testing.assert_close(mine.keys, usual.keys, rtol=0.05, atol=atol)
    assert lean.is_whole
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)  # as an adapter does
    assert not lean.is_whole


def test_models_of_another_form_keep_transformers_code() -> None:
    adapted = built(FAMILIES["qwen2"])
    adapted.model.layers[1].self_attn.k_proj = lora.LoRALinear.__new__(lora.LoRALinear)
    for model in (
        adapted,
        built(MistralConfig(**SIZES)),
        built(Qwen2Config(**SIZES, hidden_act="gelu")),
        built(LlamaConfig(**SIZES, mlp_bias=True)),
        built(Qwen3Config(**SIZES, attention_bias=True)),
        built(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=0)),
    ):
        assert LeanDecoder.of(model) is None
