"""The training engine on one GPU: bfloat16 against float32, recomputed and compiled layers, offload, resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine import tiny
from tests.unit.engine.scenarios import gradients
from verl_like.config.fsdp import FSDPConfig
from verl_like.config.optim import OptimConfig
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WANT = frozenset({"log_probs", "entropy"})


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield init_distributed(0, 1, 0, 1, "127.0.0.1", tiny.free_port(), "cuda", 60.0)
    shutdown_distributed()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    settings = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "initializer_range": 0.05}
    return tiny.model_folder(tmp_path_factory.mktemp("model"), **settings)


def test_packed_bfloat16_is_close_to_padded_float32(process: ProcessInfo, path: str) -> None:
    batch = tiny.experience(16, max_response=60)
    exact = tiny.build_engine(
        process, path, fsdp=FSDPConfig(dtype="float32"), model={"use_remove_padding": False, "use_fused_kernels": False}
    ).forward(batch, want=WANT, rule=tiny.ONE_BATCH)
    half = tiny.build_engine(process, path).forward(batch, want=WANT, rule=tiny.ONE_BATCH)
    for name in WANT:
        gap = (exact[name] - half[name])[batch.response_mask_T].abs().mean()
        assert gap < 0.01, name


def test_float32_packed_equals_padded(process: ProcessInfo, path: str) -> None:
    batch, outputs = tiny.experience(16, max_response=60), []
    for packed in (True, False):
        model = {"use_remove_padding": packed, "use_fused_kernels": packed}
        engine = tiny.build_engine(process, path, fsdp=FSDPConfig(dtype="float32"), model=model)
        outputs.append(engine.forward(batch, want=WANT, rule=tiny.ONE_BATCH))
    for name in WANT:
        torch.testing.assert_close(outputs[0][name], outputs[1][name], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"enable_gradient_checkpointing": True}},
        {"model": {"enable_gradient_checkpointing": True, "recompute_granularity": "selective"}},
        {"compile_blocks": True},
    ],
    ids=["full", "selective", "compiled"],
)
def test_recomputed_and_compiled_layers_keep_the_gradient(
    process: ProcessInfo, path: str, changes: dict[str, Any]
) -> None:
    """bfloat16 with the varlen kernel: what is recomputed or compiled rounds alike, or nearly."""
    batch, found = tiny.experience(16, max_response=60), []
    for settings in ({}, changes):
        engine = tiny.build_engine(process, path, **settings)
        found.append(gradients(engine, batch, batch))
    for name, expected in found[0].items():
        gap = float((found[1][name] - expected).norm() / (expected.norm() + 1e-12))
        assert gap < 0.02, f"{name}: {gap:.1e}"


@pytest.mark.parametrize(
    "fsdp", [FSDPConfig(param_offload=True, optimizer_offload=True), FSDPConfig(offload_policy=True)]
)
def test_offload_trains_the_same(process: ProcessInfo, path: str, fsdp: FSDPConfig) -> None:
    results = []
    for config in (FSDPConfig(), fsdp):
        engine = tiny.build_engine(process, path, fsdp=config, optim=OptimConfig(lr=1e-2, eps=1e-3))
        for seed in range(3):
            batch = tiny.experience(9, seed=seed)
            engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)
        results.append({name: tensor.cpu() for name, tensor in engine.export_weights(torch.float32)})
    for name in results[0]:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=0, atol=2e-3)


def test_manual_offload_frees_memory(process: ProcessInfo, path: str, tmp_path: Path) -> None:
    engine = tiny.build_engine(process, path)
    batch = tiny.experience(9)
    engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)
    resident = torch.cuda.memory_allocated()
    engine.offload()
    assert torch.cuda.memory_allocated() < resident
    weights = dict(engine.export_weights(torch.bfloat16))
    assert weights.keys() == engine.weight_names().keys()
    engine.onload()
    engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_offloaded_engine_saves_resumes_and_trains_on(
    process: ProcessInfo, path: str, tmp_path: Path, steps_before: int
) -> None:
    """Optimizer states that a checkpoint makes or fills must be where the next step looks for them."""
    offloaded = FSDPConfig(param_offload=True, optimizer_offload=True)
    results = []
    for fsdp in (FSDPConfig(), offloaded):
        saved = tiny.build_engine(process, path, fsdp=fsdp, optim=OptimConfig(lr=1e-2, eps=1e-3))
        for seed in range(steps_before):
            batch = tiny.experience(9, seed=seed)
            saved.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)
        folder = str(tmp_path / str(fsdp.param_offload))
        saved.save(folder, contents=["model", "optimizer", "extra"])
        resumed = tiny.build_engine(process, path, fsdp=fsdp, optim=OptimConfig(lr=1e-2, eps=1e-3))
        resumed.load(folder, contents=["model", "optimizer", "extra"])
        batch = tiny.experience(9, seed=5)
        for engine in (saved, resumed):
            engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)
            results.append({name: tensor.cpu() for name, tensor in engine.export_weights(torch.float32)})
    for other in results[1:]:
        for name in results[0]:
            torch.testing.assert_close(results[0][name], other[name], rtol=0, atol=2e-3)
