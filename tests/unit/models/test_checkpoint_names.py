"""Names and tensors that leave the engine are those that transformers itself saves."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from tests.unit.models import zoo
from verl_like.models import families
from verl_like.models.checkpoint_names import CheckpointNames


@pytest.mark.parametrize("name", list(families.FAMILIES))
def test_every_type_is_named_as_transformers_saves_it(name: str) -> None:
    model = AutoModelForCausalLM.from_config(zoo.config(name))
    names, parameters = CheckpointNames(model), dict(model.named_parameters())
    ours = dict(part for key, parameter in parameters.items() for part in names.views(key, parameter.detach()))
    theirs = revert_weight_conversion(model, dict(parameters))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert sum(tensor.numel() for tensor in ours.values()) == sum(p.numel() for p in model.parameters())


def test_views_write_into_the_parameter() -> None:
    model = AutoModelForCausalLM.from_config(zoo.config("mixtral"))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    stacked = model.get_parameter(name).detach()
    parts = dict(CheckpointNames(model).views(name, stacked))
    assert len(parts) == 16
    parts["model.layers.1.block_sparse_moe.experts.5.w3.weight"].fill_(7.0)  # up: the lower rows
    assert bool((stacked[5, 96:] == 7).all()) and not bool((stacked[5, :96] == 7).any())
    assert not bool((stacked[4] == 7).any())


def test_other_layouts_are_refused_by_name() -> None:
    """OLMo-hybrid's files split its convolution in three."""
    model = AutoModelForCausalLM.from_config(
        zoo.config(
            "olmo_hybrid",
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        )
    )
    names, key = CheckpointNames(model), "model.layers.0.linear_attn.conv1d.weight"
    with pytest.raises(ValueError, match=f"'olmo_hybrid': checkpoints hold {key} in another layout"):
        list(names.views(key, model.get_parameter(key)))
