"""What transformers' plan splits, and every reason to refuse a model, with its numbers; no weight is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, GPT2Config, PretrainedConfig, Qwen2Config

from tests.unit.engine.tiny import experience, model_folder
from tests.unit.models import zoo
from verl_like.config.fsdp import FSDPConfig
from verl_like.config.model import ModelConfig
from verl_like.models import packing
from verl_like.models.loading import build_meta_model, load_hf_config
from verl_like.models.tensor_plan import check_engine, check_model, take_slice, tensor_plan
from verl_like.parallel.ulysses import SequenceRanks


def model(path: Path, family: str = "qwen2", **changes: Any) -> tuple[ModelConfig, PretrainedConfig]:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = ModelConfig(path=model_folder(path, family, **(heads | changes)))
    return config, load_hf_config(config)


def styles(path: Path, family: str, **changes: Any) -> dict[str, str]:
    config, hf_config = model(path, family, **changes)
    token_model = build_meta_model(config, hf_config, kind="policy")
    plan = tensor_plan(token_model, hf_config, 2)
    assert plan is not None
    names = {module: name for name, module in token_model.hf.base_model.named_modules()}
    assert {names[module] for module in plan.gathered} == {
        f"layers.{layer}.{block}" for layer in (0, 1) for block in ("self_attn", "mlp")
    }
    return {names[module].removeprefix("layers.1."): style for module, style in plan.linears.items()}


def test_what_is_split(tmp_path: Path) -> None:
    columns, rows = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj", "mlp.down_proj")
    split = styles(tmp_path, "qwen3")
    assert all(split[name] == "column" for name in (*columns, "mlp.gate_proj", "mlp.up_proj"))
    assert all(split[name] == "row" for name in rows)
    assert len(split) == 2 * 7
    fused = styles(tmp_path, "phi3", pad_token_id=0)
    assert fused["self_attn.qkv_proj"] == fused["mlp.gate_up_proj"] == "column_gathered"
    assert fused["self_attn.o_proj"] == fused["mlp.down_proj"] == "row_from_whole"


def test_a_tied_embedding_stays_whole(tmp_path: Path) -> None:
    """transformers adds it to the configuration's plan when such a model is built."""
    config, hf_config = model(tmp_path, tie_word_embeddings=True)
    for _ in range(2):
        check_model(config, hf_config, 2)
    hf_config.base_model_tp_plan = {**hf_config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    check_model(config, hf_config, 2)


def test_one_rank_splits_nothing(tmp_path: Path) -> None:
    config, hf_config = model(tmp_path)
    assert tensor_plan(build_meta_model(config, hf_config, kind="policy"), hf_config, 1) is None
    check_model(config, hf_config, 1)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, r"tensor_parallel_size=3 does not divide the model's 4 attention heads: use one of \[1, 2, 4\]"),
        ({}, 4, r"tensor_parallel_size=4 does not divide the model's 2 key-value heads: use one of \[1, 2\]"),
        ({"intermediate_size": 97}, 2, r"=2 does not divide the 97 outputs of a 'qwen2' model's .*\(64 -> 97\)"),
    ],
)
def test_numbers_that_do_not_divide(tmp_path: Path, changes: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(*model(tmp_path, **changes), size)


def test_padded_rows_are_refused(tmp_path: Path) -> None:
    config, hf_config = model(tmp_path)
    padded = ModelConfig(path=config.path, use_remove_padding=False)
    with pytest.raises(ValueError, match=r"critic\.key=2 needs packed sequences: set model.use_remove_padding=True"):
        check_model(padded, hf_config, 2, "critic.key")


def with_plan(style: str) -> Qwen2Config:
    config = Qwen2Config()
    config.base_model_tp_plan = {"layers.*.self_attn.q_proj": style}
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "no tensor-parallel plan for 'gpt2'"),
        (DeepseekV3Config(), "plan for 'deepseek_v3' leaves attention whole"),
        (
            zoo.config("cohere", use_qk_norm=True),
            r"q_norm of a 'cohere' model has a weight for each head .*set it to 1",
        ),
        (
            with_plan("nonesuch"),
            r"'qwen2' has styles that are not available here \(layers\.\*\.self_attn\.q_proj: nonesuch",
        ),
    ],
)
def test_other_plans_are_refused_by_name(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(ModelConfig(path="unread"), config, 2)


def test_a_plan_without_attention_is_refused() -> None:
    config = Qwen2Config()
    config.base_model_tp_plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    with pytest.raises(ValueError, match=r"leaves attention whole.*ulysses_sequence_parallel_size"):
        check_model(ModelConfig(path="unread"), config, 2)


def test_a_plan_for_other_layers_is_refused(tmp_path: Path) -> None:
    config, hf_config = model(tmp_path)
    hf_config.base_model_tp_plan = {"blocks.*.attn.q": "colwise"}
    with pytest.raises(ValueError, match=r"none of the layers that its plan names \(blocks"):
        check_model(config, hf_config, 2)


def test_what_one_engine_cannot_combine(tmp_path: Path) -> None:
    config, hf_config = model(tmp_path)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 with ulysses_sequence_parallel_size=2"):
        check_engine(config, hf_config, FSDPConfig(tensor_parallel_size=2), ulysses=2)
    check_engine(config, hf_config, FSDPConfig(), ulysses=2)


def test_slices_keep_the_positions_of_all_tokens() -> None:
    rows = experience(3)
    whole = packing.pack(rows, packing.response_positions(rows, sampled_only=False), torch.device("cpu"))
    total = whole.input_ids.shape[1]
    parts = [take_slice(whole, SequenceRanks(group=None, size=4, rank=rank)) for rank in range(4)]  # type: ignore[arg-type]
    assert torch.equal(torch.cat([part.input_ids for part in parts], 1)[:, :total], whole.input_ids)
    for part in parts:
        assert part.segments is not None and part.segments.heads is None
        assert part.position_ids.shape[1] == 4 * part.input_ids.shape[1] == sum(part.segments.own_lengths)
        assert torch.equal(part.position_ids[:, :total], whole.position_ids)
    assert sum(len(part.select_N) for part in parts) == len(whole.select_N)
