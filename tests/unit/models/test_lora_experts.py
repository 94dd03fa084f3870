"""LoRA on stacked experts and routers: against merged weights, the chain rule, and the peft library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.unit.models import zoo
from tests.unit.models.test_lora import attached
from verl_like.config import ModelConfig
from verl_like.models import lora
from verl_like.models.adapter_config import adapter_settings
from verl_like.models.lora_experts import base_name
from verl_like.models.packing import Segments

IDS = (torch.arange(23)[None] * 7) % zoo.VOCAB


def with_noise(path: str, **changes: Any) -> tuple[Any, lora.Adapters]:
    hf, adapters = attached(path, lora_rank=3, **changes)
    generator = torch.Generator().manual_seed(0)
    for module in adapters.modules:
        nn.init.normal_(module.lora_B.weight, std=0.2, generator=generator)
    return hf, adapters


def log_probs(hf: Any, *, packed: bool = True) -> Tensor:
    given: dict[str, Any] = {"segments": Segments([IDS.shape[1]], torch.device("cpu"))} if packed else {}
    positions = torch.arange(IDS.shape[1])[None]
    return hf(input_ids=IDS, position_ids=positions, use_cache=False, **given).logits.log_softmax(-1)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "minimax_m2", "deepseek_v3"])
def test_adapted_is_merged_and_gradients_follow_the_chain_rule(tmp_path: Path, name: str) -> None:
    """Experts of both layouts, with biases and shared ones; routers; without adapters it is the base model."""
    path = zoo.folder(tmp_path, name)
    (hf, adapters), (plain, _) = with_noise(path), attached(path, target_modules=["o_proj"])
    assert {"base_layer", "experts"} < {each.rpartition(".")[2] for each in adapters.names}
    merged = dict(adapters.merged((key, p.detach()) for key, p in hf.named_parameters()))
    assert plain.load_state_dict(merged, strict=False).unexpected_keys == []
    answers = [log_probs(model) for model in (hf, plain)]
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=1e-4)
    with adapters.disabled():
        assert float((log_probs(hf) - answers[0]).detach().abs().max()) > 0.1
    plain.requires_grad_(True)
    weight = torch.randn(answers[0].shape, generator=torch.Generator().manual_seed(1))
    for model in (hf, plain):
        (log_probs(model) * weight).sum().backward()
    whole = {key: p.grad for key, p in plain.named_parameters()}
    for key, module in zip(adapters.names, adapters.modules, strict=True):
        a, b = (part.weight.detach().clone().requires_grad_() for part in (module.lora_A, module.lora_B))
        base = whole[base_name(key)]
        if base.ndim == 2:
            delta = b @ a
        else:  # as peft's ParamWrapper writes it down
            a_eri, b_ore = a.reshape(8, -1, a.shape[-1]), b.reshape(b.shape[0], -1, 8)
            delta = torch.einsum(f"ore,eri->{'eio' if adapters.transposed else 'eoi'}", b_ore, a_eri)
        expected = torch.autograd.grad((delta * module.scale * base).sum(), [a, b])
        for part, wanted in zip((module.lora_A, module.lora_B), expected, strict=True):
            gap = float((part.weight.grad - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))
            assert gap < 1e-4, f"{key}: {gap:.1e}"


@pytest.mark.parametrize(
    ("name", "targets", "ends"),
    [
        ("qwen3_moe", ["experts"], ["experts", "experts.base_layer"]),
        ("qwen3_moe", ["gate_proj", "up_proj", "down_proj"], ["experts", "experts.base_layer"]),
        ("mixtral", ["w1", "w2", "w3", "gate"], ["experts", "experts.base_layer", "gate"]),
        ("qwen3_moe", ["gate_up_proj", "down_proj"], ["experts", "experts.base_layer"]),
        ("gpt_oss", ["router", "q_proj"], ["q_proj", "router"]),
        ("qwen3_moe", r".*\.mlp\.gate", ["gate"]),
    ],
)
def test_names_of_experts_and_routers(tmp_path: Path, name: str, targets: Any, ends: list[str]) -> None:
    hf, adapters = attached(zoo.folder(tmp_path, name), target_modules=targets)
    assert sorted({re.sub(r".*layers\.\d\.(self_attn|mlp)\.", "", each) for each in adapters.names}) == ends
    trained = {key for key, p in hf.named_parameters() if p.requires_grad}
    assert trained == set(adapters.shapes())


@pytest.mark.parametrize("targets", [["gate_proj", "up_proj"], ["q_proj", "down_proj"], r".*experts\.\d+\.up_proj"])
def test_experts_named_in_part_are_refused(tmp_path: Path, targets: Any) -> None:
    with pytest.raises(ValueError, match="experts are adapted whole"):
        attached(zoo.folder(tmp_path, "qwen3_moe"), target_modules=targets)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_peft_reads_what_is_written_and_the_other_way_round(tmp_path: Path, name: str) -> None:
    peft = pytest.importorskip("peft")
    path = zoo.folder(tmp_path, name)
    hf, adapters = with_noise(path, target_modules=["q_proj", "experts", "router" if name == "gpt_oss" else "gate"])
    base = AutoModelForCausalLM.from_config(hf.config)
    base.set_attn_implementation("eager")
    base.load_state_dict({key: p for key, p in hf.state_dict().items() if "lora_" not in key})
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(
        {lora.peft_name(n): p.contiguous() for n, p in hf.state_dict().items() if "lora_" in n},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps(adapters.peft_config(path, is_value_model=False)))
    theirs = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    torch.testing.assert_close(log_probs(theirs, packed=False), log_probs(hf), rtol=0, atol=1e-4)
    for key, p in theirs.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(p, std=0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    settings, _ = adapter_settings(str(tmp_path / "theirs"), "model.lora_adapter_path", of_value_model=False)
    again, _ = attached(path, **settings)
    again.load_state_dict({key: p for key, p in hf.state_dict().items() if "lora_" not in key}, strict=False)
    lora.load_adapter(again, ModelConfig(path=path, lora_adapter_path=str(tmp_path / "theirs"), **settings))
    torch.testing.assert_close(log_probs(again), log_probs(theirs, packed=False), rtol=0, atol=1e-4)
