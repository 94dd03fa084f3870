from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.unit.engine import tiny
from verl_like.config.model import ModelConfig
from verl_like.models import loading
from verl_like.models.heads import TokenModel


def build(path: str, seed: int = 1, kind: str = "policy") -> TokenModel:
    config = ModelConfig(path=path)
    hf_config = loading.load_hf_config(config)
    return loading.build_token_model(
        config,
        hf_config,
        kind=kind,
        dtype=torch.float32,
        vocab_size=None,
        seed=seed,  # type: ignore[arg-type]
    )


def test_folder_without_weights_is_seeded_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny.model_folder(tmp_path)
    with caplog.at_level(logging.WARNING):
        a, b, c = build(path, 1), build(path, 1), build(path, 2)
    assert "holds no weights" in caplog.text
    head = "hf.lm_head.weight"
    assert torch.equal(a.get_parameter(head), b.get_parameter(head))
    assert not torch.equal(a.get_parameter(head), c.get_parameter(head))


def test_seeding_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    path = tiny.model_folder(tmp_path)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build(path)
    assert torch.equal(torch.rand(3), expected)


def test_a_folder_below_home_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = Path(tiny.model_folder(tmp_path))
    assert not loading.has_weights(f"~/{folder.name}")
    (folder / "model.safetensors").touch()
    assert loading.has_weights(f"~/{folder.name}")


def test_sharded_safetensors(tmp_path: Path) -> None:
    path = tiny.model_folder(tmp_path, num_hidden_layers=3)
    source = build(path)
    target = tmp_path / "sharded"
    source.hf.save_pretrained(target, max_shard_size="100KB")
    assert len(json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]) > 1
    loaded = build(str(target), seed=9)
    for name, parameter in source.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name)), name


def test_value_head_is_read_back(tmp_path: Path) -> None:
    path = tiny.model_folder(tmp_path)
    model = build(path, kind="value")
    assert "hf.lm_head.weight" not in dict(model.named_parameters())
    model.hf.save_pretrained(tmp_path / "critic")
    assert "score.weight" in load_file(tmp_path / "critic" / "model.safetensors")
    again = build(str(tmp_path / "critic"), seed=7, kind="value")
    assert torch.equal(again.get_parameter("hf.score.weight"), model.get_parameter("hf.score.weight"))


def test_override_config(tmp_path: Path) -> None:
    path = tiny.model_folder(tmp_path)
    config = loading.load_hf_config(ModelConfig(path=path, override_config={"attention_dropout": 0.25}))
    assert config.attention_dropout == 0.25
    with pytest.raises(ValueError, match="did you mean 'attention_dropout'"):
        loading.load_hf_config(ModelConfig(path=path, override_config={"atention_dropout": 0.25}))


def test_weights_are_those_transformers_loads(tmp_path: Path) -> None:
    path = tiny.model_folder(tmp_path, "llama", tie_word_embeddings=True)
    build(path).hf.save_pretrained(tmp_path / "saved")
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).named_parameters())
    ours = {name.removeprefix("hf."): p for name, p in build(str(tmp_path / "saved")).named_parameters()}
    assert ours.keys() == theirs.keys() and "lm_head.weight" not in ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_ranks_that_are_given_their_weights_read_none(tmp_path: Path) -> None:
    """Names, shapes and precision are there, memory is not; tied weights stay one parameter."""
    config = ModelConfig(path=tiny.model_folder(tmp_path, "llama", tie_word_embeddings=True))
    hf_config = loading.load_hf_config(config)
    settings: Any = {"kind": "policy", "dtype": torch.bfloat16, "vocab_size": None, "seed": 1}
    full, empty = (loading.build_token_model(config, hf_config, **settings, empty=e) for e in (False, True))
    shapes = [{name: (p.shape, p.dtype) for name, p in model.named_parameters()} for model in (full, empty)]
    assert shapes[0] == shapes[1] and "hf.lm_head.weight" not in shapes[1]
    assert all(p.is_meta for p in empty.parameters()) and all(b.is_meta for b in empty.buffers())
