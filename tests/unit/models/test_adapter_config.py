"""The adapter of the peft library that a run begins with: its settings, what is refused, where its tensors go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_like.config import ModelConfig
from verl_like.config.errors import ConfigError
from verl_like.models.lora import attach, load_adapter
from verl_like.trainer.compose import compose_with_warnings

SECTION = "actor_rollout_ref.model"
KEY = f"{SECTION}.lora_adapter_path"
SAVED = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "/there/tiny", "r": 2, "lora_alpha": 6,
    "lora_dropout": 0.0, "bias": "none", "init_lora_weights": True, "target_modules": ["v_proj", "q_proj"],
    "exclude_modules": None, "use_rslora": False, "use_dora": False, "rank_pattern": {}, "loftq_config": {},
    "modules_to_save": None, "megatron_core": "megatron.core", "qalora_group_size": 16, "inference_mode": True,
}  # fmt: skip


def tiny() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=11, num_hidden_layers=1, **sizes))


def tensors(rank: int = 2) -> dict[str, torch.Tensor]:
    place = "base_model.model.model.layers.0.self_attn"
    rows = {"q_proj": 8, "v_proj": 4}
    torch.manual_seed(1)
    a = {f"{place}.{name}.lora_A.weight": torch.randn(rank, 8) for name in rows}
    return a | {f"{place}.{name}.lora_B.weight": torch.randn(size, rank) for name, size in rows.items()}


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    write(folder)
    monkeypatch.chdir(tmp_path)
    return folder


def write(folder: Path, **changes: Any) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(SAVED | changes))
    save_file(tensors(), folder / "adapter_model.safetensors")


def composed(*settings: str) -> tuple[ModelConfig, list[str]]:
    config, warnings = compose_with_warnings([f"{SECTION}.path=/here/tiny", *settings])
    return config.actor_rollout_ref.model, [line for line in warnings if line.startswith(KEY)]


@pytest.mark.parametrize("spelling", [KEY, f"{SECTION}.lora.adapter_path"])
def test_rank_scale_and_modules_are_the_adapters(adapter: Path, spelling: str) -> None:
    model, _ = composed(f"{spelling}=adapter")
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (2, 6, ["v_proj", "q_proj"])
    write(adapter, use_rslora=True, target_modules=".*_proj", exclude_modules=["k_proj"], lora_dropout=0.1)
    model, told = composed(f"{KEY}=adapter", f"{SECTION}.path=/here/other")
    assert model.lora_alpha == pytest.approx(6 * 2**0.5) and model.target_modules == ".*_proj"
    assert model.exclude_modules == ["k_proj"]
    assert "lora_dropout=0.1 has no effect" in told[0]
    assert f"made for /there/tiny, and is put on {SECTION}.path=/here/other" in told[1]


def test_what_is_said_twice_must_agree(adapter: Path) -> None:
    agreeing = [f"{SECTION}.lora_rank=2", f"{SECTION}.lora_alpha=6.0", f"{SECTION}.target_modules=[q_proj,v_proj]"]
    assert composed(f"{KEY}=adapter", *agreeing)[0].lora_rank == 2
    with pytest.raises(ConfigError) as caught:
        composed(f"{KEY}=adapter", f"{SECTION}.lora_rank=8", f"{SECTION}.target_modules=all-linear")
    assert caught.value.problems == [
        f"{SECTION}.lora_rank=8, but {KEY}=adapter has lora_rank=2: leave lora_rank out",
        f"{SECTION}.target_modules=all-linear, but {KEY}=adapter has target_modules=['v_proj', 'q_proj']: leave "
        "target_modules out",
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, "describes no LoRA adapter"),
        ({"r": "many"}, "describes no LoRA adapter"),
        ({"lora_alpha": None}, "describes no LoRA adapter"),
        ({"target_modules": None}, "describes no LoRA adapter"),
        ({"use_dora": True}, "its use_dora=True is not available"),
        ({"rank_pattern": {"q_proj": 4}}, r"its rank_pattern=.* is not available"),
        ({"init_lora_weights": "pissa"}, "its init_lora_weights=pissa is not available"),
        ({"bias": "all", "layers_to_transform": [0]}, "its bias=all, layers_to_transform=.0. is not available"),
        ({"of_a_later_peft": 1}, "its of_a_later_peft=1 is not available"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
        ({"modules_to_save": ["score"]}, "modules_to_save"),
    ],
)  # fmt: skip
def test_what_is_more_than_plain_lora_is_refused(adapter: Path, changes: dict[str, Any], told: str) -> None:
    write(adapter, **changes)
    with pytest.raises(ConfigError, match=rf"^{KEY}=adapter: .*{told}"):
        composed(f"{KEY}=adapter")


def test_a_value_models_adapter_brings_its_head(adapter: Path) -> None:
    write(adapter, modules_to_save=["classifier", "score"])
    config, _ = compose_with_warnings(["critic.model.lora_adapter_path=adapter", "algorithm.adv_estimator=gae"])
    assert config.critic.model.lora_rank == 2


def test_a_folder_without_one(adapter: Path) -> None:
    relative = rf"there is no file {adapter.parent}/adaptre/adapter_config.json \(a relative path counts from"
    with pytest.raises(ConfigError, match=rf"^{KEY}=adaptre: {relative} .*; did you mean adapter\?"):
        composed(f"{KEY}=adaptre")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=rf"there is no file {adapter}/adapter_model.safetensors; name the folder"):
        composed(f"{KEY}=adapter")
    save_file(tensors(), adapter / "adapter_model.safetensors")
    for text in ("[]", "{", "[" * 100_000):
        (adapter / "adapter_config.json").write_text(text)
        with pytest.raises(ConfigError, match="describes no LoRA adapter"):
            composed(f"{KEY}=adapter")


def test_a_damaged_file(adapter: Path) -> None:
    model, _ = composed(f"{KEY}=adapter")
    (adapter / "adapter_model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match=r"lora_adapter_path=adapter: adapter_model.safetensors cannot be read"):
        load_adapter(tiny(), model)


def test_its_tensors_are_added_to_the_weights(adapter: Path) -> None:
    hf = tiny()
    before = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    model, _ = composed(f"{KEY}=adapter")
    adapters = attach(hf, model, dtype=torch.float32, seed=0)
    load_adapter(hf, model)
    merged = dict(adapters.merged((name, tensor.detach()) for name, tensor in hf.named_parameters()))
    stored, place = tensors(), "model.layers.0.self_attn.q_proj"
    added = stored[f"base_model.model.{place}.lora_B.weight"] @ stored[f"base_model.model.{place}.lora_A.weight"]
    torch.testing.assert_close(merged[f"{place}.weight"], before[f"{place}.weight"] + 6 / 2 * added)
    assert torch.equal(
        merged["model.layers.0.self_attn.k_proj.weight"], before["model.layers.0.self_attn.k_proj.weight"]
    )


@pytest.mark.parametrize(("name", "shape"), [("q_proj", (3, 8)), ("o_proj", (2, 8)), ("q_proj", None)])
def test_tensors_of_another_model_are_refused(adapter: Path, name: str, shape: tuple[int, ...] | None) -> None:
    """On the meta device too, where the start looks before any worker is there."""
    model, _ = composed(f"{KEY}=adapter")
    key, stored = f"base_model.model.model.layers.0.self_attn.{name}.lora_A.weight", tensors()
    stored = {each: tensor for each, tensor in stored.items() if each != key}
    save_file(stored | ({} if shape is None else {key: torch.zeros(shape)}), adapter / "adapter_model.safetensors")
    with torch.device("meta"):
        hf = tiny()
    attach(hf, model, dtype=torch.float32, seed=0)
    told = rf"lora_adapter_path=adapter does not fit /here/tiny: {key} is .* and .*in the model \(1 tensors"
    with pytest.raises(ValueError, match=told):
        load_adapter(hf, model)
