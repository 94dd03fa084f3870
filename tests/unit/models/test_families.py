"""Every claim of the table of model types, on a tiny random model of each type."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from tests.unit.engine import tiny
from tests.unit.models import zoo
from tests.unit.models.test_packed_forward import assert_close, build, gradient_of, run
from tests.unit.models.test_state_layers import in_float64
from verl_like.batch import Experience
from verl_like.config.model import ModelConfig
from verl_like.models import families, tensor_plan
from verl_like.models.cost import ModelCost
from verl_like.models.loading import load_hf_config

ROWS = tiny.experience(5, max_response=12)
LENGTHS = ROWS.response_length_B.tolist()
GROUPS = tiny.experience(4, rows_per_prompt=2, max_response=12)
LONG = tiny.experience(4, rows_per_prompt=2, max_response=40)
# recurrent layers multiply rounding along the sequence
TOLERANCE = {name: 1e-4 for name, family in families.FAMILIES.items() if family.state}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_packed_equals_single_equals_padded(tmp_path: Path, name: str) -> None:
    """Values and gradients; padded rows run through transformers' eager attention, an independent opinion."""
    path = zoo.folder(tmp_path, name)
    packed_model, padded_model = build(path, packed=True), build(path, packed=False)
    packed, padded = run(packed_model, ROWS, packed=True), run(padded_model, ROWS, packed=False)
    for i, row in enumerate(ROWS.split([1] * len(ROWS))):
        single = run(packed_model, row, packed=True)
        assert_close(single, {key: value.split(LENGTHS)[i] for key, value in packed.items()}, 2e-5)
    assert_close(packed, padded, TOLERANCE.get(name, 2e-5))
    assert_close(gradient_of(packed_model, packed), gradient_of(padded_model, padded), TOLERANCE.get(name, 5e-5))
    shared, apart = run(packed_model, GROUPS, packed=True, share=True), run(packed_model, GROUPS, packed=True)
    assert_close(shared, apart, TOLERANCE.get(name, 2e-5))
    assert_close(gradient_of(packed_model, shared), gradient_of(packed_model, apart), TOLERANCE.get(name, 5e-5))


@pytest.mark.parametrize("name", [name for name, family in families.FAMILIES.items() if not family.state])
def test_packed_is_transformers_row_by_row_in_float64(tmp_path: Path, name: str) -> None:
    """Shared prompts; of transformers' own model each row alone, with every gradient. No value of it is neutral."""
    model = build(zoo.folder(tmp_path, name, **zoo.telling(name)), packed=True)
    zoo.scatter(model.hf)
    model.double()
    if families.num_experts(model.hf.config):
        model.hf.set_experts_implementation("eager")  # grouped products take no float64
    theirs = copy.deepcopy(model.hf)
    theirs.set_attn_implementation("eager")
    with in_float64():
        found, expected = run(model, LONG, packed=True, share=True)["log_probs"], rows_alone(theirs, LONG)
        assert float((found - expected).detach().abs().max()) < 1e-10
        weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        gradients = []
        for hf, values in ((model.hf, found), (theirs, expected)):
            (values * weights).sum().backward()
            gradients.append({key: p.grad for key, p in hf.named_parameters() if p.requires_grad})
    assert all(grad is not None and float(grad.abs().max()) > 0 for grad in gradients[1].values())
    assert_close(gradients[0], gradients[1], 1e-10)


def rows_alone(hf: PreTrainedModel, rows: Experience) -> torch.Tensor:
    """Log-probs [T] of the responses at temperature 0.8, each row alone through transformers, 0 where not sampled."""
    found = []
    for row in rows.split([1] * len(rows)):
        ids = torch.cat([row.prompt_ids_T, row.response_ids_T]).long()[None]
        log_probs = (hf(input_ids=ids).logits[0, :-1] / 0.8)[:, : tiny.VOCAB].log_softmax(-1)
        chosen = log_probs.gather(1, ids[0, 1:, None])[-len(row.response_ids_T) :, 0]
        found.append(torch.where(row.response_mask_T, chosen, 0.0))
    return torch.cat(found)


@pytest.mark.parametrize("name", list(families.FAMILIES))
def test_costs_can_be_counted(name: str) -> None:
    cost = ModelCost.of(zoo.config(name))
    assert 0 < cost.body_weights <= cost.all_weights and cost.forward_flops([10], 4) > 0


@pytest.mark.parametrize("name", sorted(families.REFUSED))
def test_refused_types_are_named_before_anything_is_loaded(tmp_path: Path, name: str) -> None:
    path = zoo.folder(tmp_path, name)
    for packed in (True, False):
        with pytest.raises(ValueError, match=f"model type '{name}' is not available"):
            load_hf_config(ModelConfig(path=path, use_remove_padding=packed))


def test_a_plan_that_leaves_attention_whole_is_refused(tmp_path: Path) -> None:
    config = ModelConfig(path=zoo.folder(tmp_path, "deepseek_v3"))
    with pytest.raises(ValueError, match=r"plan for 'deepseek_v3' leaves attention whole, .*ulysses"):
        tensor_plan.check_model(config, load_hf_config(config), 2)


class OtherConfig(Qwen2Config):
    model_type = "never_seen"


class StatefulConfig(Qwen2Config):
    model_type = "never_seen_stateful"


def test_unknown_types_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    families._warn_untested.cache_clear()
    with caplog.at_level(logging.WARNING):
        families.check(OtherConfig(), packed=True)
        families.check(OtherConfig(), packed=True)
    assert caplog.text.count("'never_seen' is not among those tested") == 1


@pytest.mark.parametrize("key", ["layer_types", "layers_block_type"])
def test_unknown_types_with_other_layers_than_attention_need_padding(key: str) -> None:
    config = StatefulConfig()
    setattr(config, key, ["full_attention", "mamba2"])
    with pytest.raises(ValueError, match="'never_seen_stateful' cannot be run without padding: its mamba2 layers"):
        families.check(config, packed=True)
    families.check(config, packed=False)


@pytest.mark.parametrize("settings", [{"quant_method": "gptq"}, {"quant_method": "bitsandbytes"}])
def test_quantised_weights_are_refused(settings: dict[str, str]) -> None:
    config: PretrainedConfig = zoo.config("qwen3")
    config.quantization_config = settings
    with pytest.raises(ValueError, match=f"quantised .*{settings['quant_method']}"):
        families.check(config, packed=True)
