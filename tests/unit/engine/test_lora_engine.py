"""LoRA through the engine: what is trained, saved, exported and delivered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.contracts.engine_ends import within
from tests.unit.engine import tiny
from tests.unit.engine.tiny import PolicyLoss, ValueLoss, build_engine, denominators, experience, weights
from tests.unit.rollout.tiny import build_for
from verl_like.config import ModelConfig, OptimConfig, RolloutConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.checksum import checksum
from verl_like.parallel.dist import ProcessInfo
from verl_like.weight_sync.verdict import WeightSyncError

LORA = {"lora_rank": 4, "lora_alpha": 8}
WANT = frozenset({"log_probs"})
CONTENTS = ["model", "optimizer", "extra"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, process: ProcessInfo) -> str:
    """A folder with weights: a run starts from a trained model."""
    return tiny.trained_folder(tmp_path_factory.mktemp("model"), process)


def lora_engine(process: ProcessInfo, path: str, model: dict[str, Any] | None = None, **changes: Any) -> FSDPEngine:
    settings: dict[str, Any] = {"optim": OptimConfig(lr=3e-2)} | changes
    return build_engine(process, path, model=LORA | (model or {}), **settings)


def step(engine: FSDPEngine, seed: int = 0, loss: Any = None) -> None:
    batch = experience(9, seed=seed)
    engine.train_minibatch(batch, loss or PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)


def log_probs(engine: FSDPEngine) -> Tensor:
    return engine.forward(experience(9), want=WANT, rule=tiny.ONE_BATCH)["log_probs"]


def test_only_adapters_are_trained_and_have_optimizer_states(process: ProcessInfo, path: str) -> None:
    engine = lora_engine(process, path)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    step(engine)
    step(engine, 1)
    changed = {name for name, p in engine.model.named_parameters() if not torch.equal(p.detach(), before[name])}
    assert changed == {name for name in before if "lora_" in name}
    states = {id(p) for p in engine.optimizer.state} if engine.optimizer else set()
    assert states == {id(p) for name, p in engine.model.named_parameters() if "lora_" in name}


def test_the_base_model_is_the_reference(process: ProcessInfo, path: str) -> None:
    engine, reference = lora_engine(process, path), build_engine(process, path, optim=None)
    before = log_probs(reference)
    torch.testing.assert_close(log_probs(engine), before, rtol=0, atol=0)  # B starts at zero
    for seed in range(3):
        step(engine, seed)
    assert float((log_probs(engine) - before).abs().max()) > 0.1
    with engine.base_model():
        torch.testing.assert_close(log_probs(engine), before, rtol=0, atol=0)
    with pytest.raises(ValueError, match="only LoRA keeps the base model"), reference.base_model():
        pass


def test_the_merged_export_is_the_adapted_model(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    engine = lora_engine(process, path)
    for seed in range(3):
        step(engine, seed)
    exported = dict(engine.export_weights(torch.float32))
    assert {name: tensor.shape for name, tensor in exported.items()} == engine.weight_names()
    engine.export_hf(str(tmp_path))
    plain = build_engine(process, str(tmp_path), optim=None)
    torch.testing.assert_close(log_probs(plain), log_probs(engine), rtol=0, atol=1e-4)
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_adapters_apart_add_up_to_the_merged_export(process: ProcessInfo, path: str) -> None:
    engine = lora_engine(process, path)
    for seed in range(2):
        step(engine, seed)
    merged, apart = dict(engine.export_weights(torch.float32)), dict(engine.export_weights(torch.float32, "apart"))
    assert {name: tensor.shape for name, tensor in apart.items()} == engine.weight_names("apart")
    alone = dict(engine.export_weights(torch.float32, "adapters"))
    assert {name: tensor.shape for name, tensor in alone.items()} == engine.weight_names("adapters")
    assert all(torch.equal(tensor, apart[name]) for name, tensor in alone.items())
    modules = {name.rpartition(".lora_")[0] for name in alone}
    assert len(modules) == 2 * 7
    for name, tensor in merged.items():
        module = name.removesuffix(".weight")
        a, b = (alone.get(f"{module}.lora_{part}.weight") for part in "AB")
        adapted = apart[name] if a is None or b is None else apart[name] + b @ a
        torch.testing.assert_close(adapted, tensor, rtol=0, atol=1e-6)


def test_without_lora_there_are_no_adapters_to_send(process: ProcessInfo, path: str) -> None:
    with pytest.raises(ValueError, match="'adapters' need LoRA adapters"):
        build_engine(process, path).weight_names("adapters")


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_a_checkpoint_holds_the_adapter_alone(process: ProcessInfo, path: str, tmp_path: Path, kind: str) -> None:
    loss = PolicyLoss() if kind == "policy" else ValueLoss()
    engine = lora_engine(process, path, kind=kind)
    step(engine, 0, loss)
    engine.save(str(tmp_path), contents=CONTENTS)
    resumed = lora_engine(process, path, kind=kind, seed=77)
    resumed.load(str(tmp_path), contents=CONTENTS)
    for each in (engine, resumed):
        step(each, 1, loss)
    expected, actual = weights(engine), weights(resumed)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    size = sum(file.stat().st_size for file in (tmp_path / "model").iterdir())
    assert size < 0.6 * Path(path, "model.safetensors").stat().st_size


def test_the_adapter_is_saved_as_peft_reads_it(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    """Applied by hand to the base weights, as peft's documentation says, it gives the merged model."""
    engine = lora_engine(process, path)
    step(engine)
    step(engine, 1)
    engine.save(str(tmp_path), contents=["model"])
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["task_type"]) == ("LORA", 4, 8, "CAUSAL_LM")
    base = load_file(Path(path) / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    merged = base[f"{name}.weight"] + config["lora_alpha"] / config["r"] * b @ a
    torch.testing.assert_close(merged, weights(engine)[f"{name}.weight"], rtol=0, atol=1e-6)
    assert len(tensors) == 2 * 2 * 7


def test_a_base_without_weights_is_saved_too(process: ProcessInfo, tmp_path: Path) -> None:
    """Its random weights are nowhere else: another seed must not give another base."""
    folder = tiny.model_folder(tmp_path)
    engine, other = lora_engine(process, folder), lora_engine(process, folder, seed=5)
    step(engine)
    engine.save(str(tmp_path / "saved"), contents=["model"])
    other.load(str(tmp_path / "saved"), contents=["model"])
    assert torch.equal(log_probs(engine), log_probs(other))


def test_adapters_that_are_not_delivered_fail_the_sync(
    process: ProcessInfo, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: the base weights go out without the adapters, every name and checksum in order."""
    engine = lora_engine(process, path)
    rollout = build_for("hf", ModelConfig(path=path), process, tokenizer_size=tiny.VOCAB)
    sync = within(engine, rollout, RolloutConfig(), process)
    sync(1)
    for seed in range(3):
        step(engine, seed)
    report = sync(2)
    assert report.probe_gap is not None and report.probe_gap < 1e-3
    name = "model.layers.1.mlp.up_proj.weight"
    merged = weights(engine)[name]
    assert rollout.weight_checksums({name: merged.shape}) == [(name, int(checksum(merged)))]
    assert engine._adapters is not None
    base_only = lambda self, stream: ((n, t) for n, t in stream if "lora_" not in n)  # noqa: E731
    monkeypatch.setattr(type(engine._adapters), "merged", base_only)
    with pytest.raises(WeightSyncError, match="log-probs of the probe differ"):
        sync(3)
    assert rollout.weight_version is None
    rollout.shutdown()
