"""What saves memory on a GPU: it must save it, and change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine import tiny
from tests.unit.engine.scenarios import gradients
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig
from verl_like.config.optim import OptimConfig
from verl_like.parallel import activation_offload
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EXACT = FSDPConfig(dtype="float32")


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield init_distributed(0, 1, 0, 1, "127.0.0.1", tiny.free_port(), "cuda", 60.0)
    shutdown_distributed()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    settings = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "initializer_range": 0.05}
    return tiny.model_folder(tmp_path_factory.mktemp("model"), **settings)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activation_offload_moves_bytes_and_keeps_the_gradient(
    process: ProcessInfo, path: str, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1024)
    batch, found = tiny.experience(16, max_response=60), []
    for offload in (False, True):
        model = {"enable_activation_offload": offload, "enable_gradient_checkpointing": checkpointing}
        engine = tiny.build_engine(process, path, fsdp=EXACT, model=model)
        found.append(gradients(engine, batch, batch))
        assert (engine._activations is not None) == offload
    assert engine._activations is not None and engine._activations.num_bytes > 0
    for name in found[0]:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lora", [0, 4])
def test_offloaded_shards_come_back(process: ProcessInfo, path: str, lora: int) -> None:
    results = []
    for offload in (False, True):
        fsdp = FSDPConfig(dtype="float32", param_offload=offload, optimizer_offload=offload)
        model = {"lora_rank": lora}
        engine = tiny.build_engine(process, path, fsdp=fsdp, model=model)
        for seed in range(3):
            batch = tiny.experience(9, seed=seed)
            engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)
            engine.forward(batch, want=frozenset({"log_probs"}), rule=tiny.ONE_BATCH)
        if offload:
            assert all(p.device.type == "cpu" for p in engine.model.parameters())
        results.append({name: tensor.cpu() for name, tensor in engine.export_weights(torch.float32)})
    for name in results[0]:
        torch.testing.assert_close(results[1][name], results[0][name], rtol=0, atol=1e-3)


def test_the_base_of_lora_has_no_master_copy(process: ProcessInfo, path: str) -> None:
    engine = tiny.build_engine(process, path, model={"lora_rank": 4})
    kinds = {("lora_" in name, p.dtype) for name, p in engine.model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    batch = tiny.experience(9)
    metrics = engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)
    assert metrics["grad_norm"].value > 0


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "limit_gb"), [("adamw_bf16", 22), ("adamw_8bit", 19)])
def test_a_model_of_1_5b_trains_in_full_within_24_gb(
    process: ProcessInfo, tmp_path: Path, optimizer: str, limit_gb: float, record_property: Any
) -> None:
    """Qwen2.5-1.5B's shape, random weights, two micro-batches of 16k tokens, full gradient checkpointing."""
    shape = {"vocab_size": 151_936, "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12}
    shape |= {"num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 8960, "max_position_embeddings": 4096}
    path = tiny.model_folder(tmp_path, tie_word_embeddings=True, initializer_range=0.02, **shape)
    settings: Any = {"optimizer": optimizer, "lr": 1e-6}
    engine = tiny.build_engine(
        process,
        path,
        optim=OptimConfig(**settings),
        fsdp=FSDPConfig(model_dtype="bfloat16"),
        model={"enable_gradient_checkpointing": True},
        tokenizer_size=None,
    )
    batch = tiny.experience(64, vocab=151_000, max_response=1000)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        rule = MicroBatchRule(max_tokens=16_384)
        metrics = engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=rule)
    peak = torch.cuda.max_memory_allocated() / 1e9
    print(f"{optimizer}: peak {peak:.2f} GB, micro-batches {metrics['perf/micro_batches'].value}")
    assert metrics["skipped_steps"].value == 0 and metrics["grad_norm"].value > 0
    assert peak < limit_gb
