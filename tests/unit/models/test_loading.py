from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.unit.engine import tiny
from tests.unit.models import zoo
from tests.unit.models.rows import sequences
from verl_like.config.model import ModelConfig
from verl_like.models import families, loading, packing
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


def test_a_value_model_lacks_no_head_of_a_language_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers calls the head that is read unexpected, and reports another as newly made; what lacks is told."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    build(tiny.model_folder(tmp_path), kind="value").hf.save_pretrained(folder := tmp_path / "critic")
    caplog.clear()
    build(str(folder), kind="value")
    assert not caplog.records
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    build(str(folder), kind="value")
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == f"{folder} lacks model.norm.weight: new weights stand in"


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


def checked(folder: Path | str, kind: loading.Kind = "policy", **changes: Any) -> None:
    model = ModelConfig(path=str(folder), **changes)
    whole = loading.build_meta_model(model, loading.load_hf_config(model), kind=kind)
    loading.check_weights(model, whole)


BROKEN = {  # what is done to the files of a sound folder, and what is told of it
    "short": (lambda folder: shorten(folder / "model.safetensors"), "cannot be read .*incomplete metadata"),
    "pointer": (lambda folder: (folder / "model.safetensors").write_text(POINTER), "cannot be read .*header too large"),
    "other name": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
        "in neither model.safetensors nor files that model.safetensors.index.json names",
    ),
    "index alone": (lambda folder: (folder / "model.safetensors").rename(folder / INDEX), "cannot be read .*Decode"),
    "shard absent": (
        lambda folder: ((folder / "model.safetensors").unlink(), (folder / INDEX).write_text(SHARDS)),
        "cannot be read .*00001-of-00002.safetensors is damaged: it is no file",
    ),
    "layers": (lambda folder: change(folder, num_hidden_layers=9), r"another model's: model\.layers\.\d.*not there"),
    "width": (lambda folder: change(folder, intermediate_size=8), r"another model's: .*gate_proj.weight is \("),
    "head": (lambda folder: change(folder, tie_word_embeddings=False), "another model's: lm_head.weight is not there"),
    "config": (lambda folder: change(folder, num_hidden_layers=-1), "config.json cannot be used: "),
    "rope": (
        lambda folder: change(folder, rope_parameters={"rope_type": "no"}),
        "config.json cannot be used: KeyError",
    ),
    "text": (lambda folder: change(folder, hidden_size="wide"), "config.json cannot be used: "),
}
INDEX, POINTER = "model.safetensors.index.json", "version https://git-lfs.github.com/spec/v1\nsize 1\n"
SHARDS = '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"layer_types": None, "max_window_layers": 9} | values
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("fault", BROKEN)
def test_weights_that_are_not_those_of_the_config_are_told_of(tmp_path: Path, fault: str) -> None:
    folder = tmp_path
    AutoModelForCausalLM.from_config(zoo.config("qwen2", tie_word_embeddings=True)).save_pretrained(folder)
    change(folder)
    checked(folder)
    damage, told = BROKEN[fault]
    damage(folder)
    with pytest.raises(ValueError, match=f"^model.path={folder}: its .*{told}"):
        checked(folder)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_weights_of_every_family_are_its_own(tmp_path: Path, name: str) -> None:
    AutoModelForCausalLM.from_config(zoo.config(name)).save_pretrained(tmp_path)
    checked(tmp_path)
    checked(tmp_path, kind="value")


def test_longrope_has_positions_up_to_its_other_frequencies(tmp_path: Path) -> None:
    """Beyond them the log-probs of a short row depend on what is beside it; before, and of other types, they do not."""
    path = zoo.folder(tmp_path, "phi3", **zoo.telling("phi3"))
    model = build(path)
    config = model.hf.config
    assert loading.num_positions(config) == 64 < config.max_position_embeddings
    assert "64 positions (original_max_position_embeddings) before its RoPE" in loading.tell_positions(config)
    short, within, beyond = (([5, 6, 7], [3] * count) for count in (4, 60, 63))

    def of_the_short(*rows: tuple[list[int], list[int]]) -> torch.Tensor:
        batch = sequences(rows)
        x = packing.pack(batch, packing.response_positions(batch, sampled_only=False), torch.device("cpu"))
        return x.unpack(model(x, frozenset({"log_probs"}), 1.0)["log_probs"])[:4]

    alone = of_the_short(short)
    torch.testing.assert_close(of_the_short(short, within), alone, rtol=0, atol=1e-5)
    assert float((of_the_short(short, beyond) - alone).detach().abs().max()) > 1e-2
    plain = zoo.config("qwen3", max_position_embeddings=99)
    assert loading.tell_positions(plain) == "the model has 99 positions (max_position_embeddings)"
