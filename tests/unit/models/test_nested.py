"""Models that hold a text model beside a tower for images, trained on text alone; against transformers' whole model."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, Gemma3nConfig, Mistral3Config

from tests.contracts.engine_ends import within
from tests.unit.engine import tiny
from tests.unit.engine.test_families_engine import generated
from tests.unit.engine.tiny import PolicyLoss, build_engine, denominators, experience, weights
from tests.unit.models import zoo
from tests.unit.models.test_packed_forward import assert_close, build, run
from tests.unit.models.test_state_layers import (
    GROUPS,
    assert_equal_gradients,
    double,
    gradients,
    in_float64,
    log_probs_row_by_row,
    packed_log_probs,
)
from tests.unit.rollout.tiny import build_for
from verl_like.config import ModelConfig, OptimConfig, RolloutConfig
from verl_like.models import families
from verl_like.models.cost import ModelCost
from verl_like.models.loading import load_hf_config
from verl_like.parallel.dist import ProcessInfo

NAMES = list(families.NESTED)
TOWER = ("visual.", "vision_tower.", "multi_modal_projector.")


def is_tower(name: str) -> bool:
    return any(part in name for part in TOWER)


@pytest.mark.parametrize("name", NAMES)
def test_packed_text_equals_transformers_row_by_row(tmp_path: Path, name: str) -> None:
    """Log-probs and the gradients of all weights of the text model, in float64, prompts shared."""
    model = double(zoo.folder(tmp_path, name))
    config = copy.deepcopy(model.hf.config)
    reference: Any = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    reference.double().eval().load_state_dict(model.hf.state_dict())
    with in_float64():
        expected, found = log_probs_row_by_row(reference, GROUPS), packed_log_probs(model, GROUPS, share=True)
        assert float((found - expected).detach().abs().max()) < 1e-10
        theirs = gradients(reference, expected)
        assert theirs.keys() == {key for key, _ in reference.named_parameters() if not is_tower(key)}
        assert_equal_gradients(gradients(model, found), theirs)


@pytest.mark.parametrize("name", NAMES)
def test_padded_rows_equal_packed_ones(tmp_path: Path, name: str) -> None:
    path = zoo.folder(tmp_path, name)
    packed, padded = (run(build(path, packed=packed), GROUPS, packed=packed) for packed in (True, False))
    assert_close(packed, padded, 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_an_adapted_text_model_is_delivered_whole(
    process: ProcessInfo, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """LoRA step, sync with its proof, tokens generated and scored; the tower is neither adapted nor trained."""
    path = zoo.folder(tmp_path, name)
    families.tell_text_alone.cache_clear()
    with caplog.at_level(logging.INFO):
        engine = build_engine(process, path, model={"lora_rank": 4}, optim=OptimConfig(lr=1e-2))
    assert f"model type '{name}': its text model" in caplog.text
    before, batch = weights(engine), experience(4)
    engine.train_minibatch(batch, PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)
    after = weights(engine)
    changed = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert changed and not any(is_tower(key) for key in changed) and any(is_tower(key) for key in after)
    rollout = build_for("hf", ModelConfig(path=path), process, tokenizer_size=tiny.VOCAB, max_model_len=40)
    report = within(engine, rollout, RolloutConfig(), process)(1)
    assert report.num_read_back == report.num_tensors == len(engine.weight_names())
    rows = generated(rollout)
    trained = engine.forward(rows, want=frozenset({"log_probs"}), rule=tiny.ONE_BATCH)["log_probs"]
    assert rows.rollout_log_probs_T is not None
    assert float((trained - rows.rollout_log_probs_T)[rows.response_mask_T].abs().max()) < 2e-4
    rollout.shutdown()


@pytest.mark.parametrize("name", ["qwen3_5", "mistral3", "qwen3_vl_moe"])
def test_an_exported_folder_is_the_whole_model(process: ProcessInfo, tmp_path: Path, name: str) -> None:
    """Full training: the tower stays as it was, and transformers loads text and tower from the folder."""
    engine, batch = build_engine(process, zoo.folder(tmp_path, name), optim=OptimConfig(lr=1e-2)), experience(4)
    before = weights(engine)
    engine.train_minibatch(batch, PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)
    engine.export_hf(str(tmp_path / "out"))
    stored, after = load_file(tmp_path / "out" / "model.safetensors"), weights(engine)
    assert stored.keys() == after.keys() and all(torch.equal(stored[key], after[key]) for key in after)
    assert all(torch.equal(before[key], after[key]) == is_tower(key) for key in after)
    theirs: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
    trained = {key.removeprefix("hf."): p for key, p in engine.model.named_parameters()}
    assert trained.keys() == dict(theirs.named_parameters()).keys()
    for key, parameter in theirs.named_parameters():
        assert torch.equal(parameter, trained[key].full_tensor()), key  # type: ignore[operator]


def test_a_tower_costs_no_operations(tmp_path: Path) -> None:
    """Numbers of the matrices of Gemma 3: those of its text model, which transformers can build alone."""
    whole = load_hf_config(ModelConfig(path=zoo.folder(tmp_path, "gemma3")))
    cost, text = ModelCost.of(whole), ModelCost.of(zoo.config("gemma3_text"))
    assert cost.body_weights == text.body_weights and cost.all_weights > text.all_weights


def test_models_with_audio_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'gemma3n' holds its text model \('gemma3n_text'\) .*save the text"):
        families.check(Gemma3nConfig(), packed=True)


def test_a_text_model_that_is_refused_is_refused_inside_another() -> None:
    config = Mistral3Config(text_config=zoo.config("phimoe").to_dict())
    with pytest.raises(ValueError, match="model type 'phimoe' is not available"):
        families.check(config, packed=True)
