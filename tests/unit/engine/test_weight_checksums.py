"""Checksums that come from the shards are those of the exported tensors; ranks: test_ranks and test_tensor_parallel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine import tiny
from tests.unit.models import zoo
from verl_like.models.lora import LoRALinear
from verl_like.parallel.checksum import checksum
from verl_like.parallel.dist import ProcessInfo

LORA = {"lora_rank": 6, "lora_alpha": 10}  # alpha / rank is no power of two


def with_adapters(engine: Any) -> Any:
    """B starts at zero: give it numbers."""
    with torch.no_grad():
        for module in engine.model.modules():
            if isinstance(module, LoRALinear):
                torch.nn.init.normal_(module.lora_B.weight)
    return engine


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["plain", "tied"])
def test_dense_models(process: ProcessInfo, tmp_path: Path, changes: dict[str, Any]) -> None:
    engine = tiny.build_engine(process, tiny.model_folder(tmp_path, **changes))
    assert tiny.unlike_shards(engine) == []
    assert engine.weight_checksums(torch.float32).keys() == engine.weight_names().keys()
    batch = tiny.experience(4)  # gathered weights of a pass do not stand in for shards
    engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)
    engine.forward(batch, want=frozenset({"log_probs"}), rule=tiny.ONE_BATCH)
    assert tiny.unlike_shards(engine) == []


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_have_one_each(process: ProcessInfo, tmp_path: Path, name: str) -> None:
    engine = tiny.build_engine(process, zoo.folder(tmp_path, name))
    assert any(".experts.1." in key for key in engine.weight_names())
    assert tiny.unlike_shards(engine) == []


@pytest.mark.parametrize("form", ["merged", "apart", "adapters"])
def test_adapters(process: ProcessInfo, tmp_path: Path, form: Any) -> None:
    path = tiny.model_folder(tmp_path)
    engine = with_adapters(tiny.build_engine(process, path, model=LORA))
    assert tiny.unlike_shards(engine, form) == []
    assert engine.weight_checksums(torch.float32, form).keys() == engine.weight_names(form).keys()


def test_a_gather_that_gives_old_weights_is_seen(
    process: ProcessInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted below the export: whole tensors, and matrices on their way into a merge."""
    name = "model.layers.1.self_attn.v_proj.weight"
    for keys in ({}, LORA):
        engine = with_adapters(tiny.build_engine(process, tiny.model_folder(tmp_path), model=keys))
        full, parts = engine.sharding.full_weights, engine.sharding.weights_in_parts
        old = {n: t.clone() for n, t in full(torch.float32)}
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.add_(1e-6)

        def stale(*settings: Any, full: Any = full, old: Any = old) -> Iterator[tuple[str, Any]]:
            for key, tensor in full(*settings):
                yield key, old[key].to(tensor.dtype) if key.endswith(name) else tensor

        def stale_parts(*settings: Any, parts: Any = parts, old: Any = old) -> Iterator[tuple[str, int, Any]]:
            for key, first, tensor in parts(*settings):
                yield key, first, old[key].to(tensor.dtype) if key.endswith(name) else tensor

        monkeypatch.setattr(engine.sharding, "full_weights", stale)
        monkeypatch.setattr(engine.sharding, "weights_in_parts", stale_parts)
        if keys:
            with pytest.raises(RuntimeError, match=rf"1 tensors to be merged differ .*{name}"):
                engine.weight_checksums(torch.float32)
        else:
            told = engine.weight_checksums(torch.float32)
            sent = {key: int(checksum(tensor)) for key, tensor in engine.export_weights(torch.float32)}
            assert [key for key in told if told[key] != sent[key]] == [name]
