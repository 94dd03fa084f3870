"""Predicted activations against what torch's own hooks see autograd keep, on the engine's real path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from tests.unit.engine import tiny
from verl_like.batch import Experience
from verl_like.config.fsdp import FSDPConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.models import memory
from verl_like.models.cost import ModelCost
from verl_like.models.memory import Shape, activation_bytes, cache_token_bytes, layer_bytes
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed

WIDER = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 320, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield init_distributed(0, 1, 0, 1, "127.0.0.1", tiny.free_port(), "cpu", 60.0)
    shutdown_distributed()


def kept_bytes(engine: FSDPEngine, batch: Experience) -> int:
    """Every storage that autograd holds after the forward pass, once; gathered weights left out."""
    found: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)  # so that no address is used twice
        return tensor

    engine.sharding.root.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine._answers(batch, frozenset({"log_probs", "entropy"}), 1.0)
    for weight in gathered(engine.sharding.root):
        found.pop(weight.untyped_storage().data_ptr(), None)
    return sum(found.values())


def gathered(root: nn.Module) -> Iterator[torch.Tensor]:
    """The whole weights of FSDP2's units."""
    for module in root.modules():
        state = getattr(module, "_get_fsdp_state", None)
        group = None if state is None else state()._fsdp_param_group
        yield from () if group is None else (parameter._unsharded_param for parameter in group.fsdp_params)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("dtype", "lean"), [("float32", True), ("bfloat16", False)])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_activations_are_those_that_autograd_keeps(
    process: ProcessInfo, tmp_path: Path, architecture: str, dtype: str, lean: bool, recompute: memory.Recompute
) -> None:
    folder = tiny.model_folder(tmp_path, architecture, **WIDER)
    keys = {"enable_gradient_checkpointing": recompute == "full", "use_lean_ops": lean}
    engine = tiny.build_engine(process, folder, fsdp=FSDPConfig(dtype=dtype), model=keys)
    batch = tiny.experience(8, max_response=200)
    tokens, predicted = int(batch.num_tokens_B().sum()), int(batch.response_mask_BR.sum())
    config = AutoConfig.from_pretrained(folder)
    path = memory.Path(c=4 if dtype == "float32" else 2, recompute=recompute, on_cpu=True, lean_norms=lean)
    told = activation_bytes(Shape.of(config, ModelCost.of(config)), path, tokens, tokens // len(batch), predicted)
    assert told == pytest.approx(kept_bytes(engine, batch), rel=0.05)


def test_a_layer_by_hand() -> None:
    """On a GPU, bfloat16: two norms of (4 + 2) bytes and their results, q, k, v and the result, four MLP tensors."""
    shape = Shape(
        hidden=32,
        layers=3,
        heads=4,
        kv_heads=2,
        head_size=8,
        inner=96,
        vocab=50,
        normed_heads=False,
        all_weights=10_000,
        root_weights=1_600,
        tied=True,
    )
    gpu = memory.Path(c=2)
    assert layer_bytes(shape, gpu, 100) == 2 * (4 + 6 * 32) + 2 * 2 * 32 + 2 * (2 * 32 + 2 * 16) + 4 * 4 + 2 * 4 * 96
    assert memory.recomputed_bytes(shape, gpu, 10, 100) == 10 * layer_bytes(shape, gpu, 100)
    assert memory.recomputed_bytes(shape, memory.Path(c=2, recompute="none"), 10, 100) == 0
    assert shape.layer_weights == 2_800 and cache_token_bytes(shape, 2) == 2 * 2 * 16 * 3
    assert shape.lora_weights(8) == 3 * 8 * (2 * 64 + 2 * 48 + 3 * 128)
    long, short = (layer_bytes(shape, memory.Path(c=4, on_cpu=True), row) for row in (513, 512))
    assert short - long == 4 * 4 * (512 + 64) / 2 - 4 * (32 + 4)  # weights of blocks; SDPA's copy of q, its normaliser
