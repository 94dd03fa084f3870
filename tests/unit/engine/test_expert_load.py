"""The load of experts: by hand, and against the choices of a plain forward pass of each sequence alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine import tiny
from tests.unit.engine.scenarios import RULE
from tests.unit.engine.tiny import PolicyLoss, build_engine, denominators, experience
from tests.unit.models import zoo
from verl_like.engine.expert_load import load_metrics
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo


def test_by_hand() -> None:
    found = load_metrics(torch.tensor([[2, 2, 2, 2], [6, 2, 0, 0]]))
    assert found["moe_max_load"].value == pytest.approx(6 / 2)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert found["moe_load_entropy"].value == pytest.approx((1 + entropy) / 2)
    assert found["moe_idle_experts"].value == 2 / 8
    assert load_metrics(torch.zeros(2, 4, dtype=torch.int64)) == {}


def plain_counts(engine: FSDPEngine, batch: Any) -> Tensor:
    """[layers, experts] from the routers themselves, sequence by sequence; a row's last token predicts nothing."""
    counts = torch.zeros(2, 8, dtype=torch.int64)

    def count(index: int) -> Any:
        def hook(_: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            counts[index] += torch.bincount(output[2].flatten(), minlength=8)

        return hook

    layers: Any = engine.model.hf.base_model.layers
    hooks = [layer.mlp.gate.register_forward_hook(count(i)) for i, layer in enumerate(layers)]
    for row in batch.split([1] * len(batch)):
        engine.forward(row, want=frozenset({"log_probs"}), rule=tiny.ONE_BATCH)
    for hook in hooks:
        hook.remove()
    return counts


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_token_that_learns_counts_once(process: ProcessInfo, tmp_path: Path, checkpointing: bool) -> None:
    """Micro-batches, a recomputed layer and rows that are only watched change nothing; forward passes do not count."""
    path, batch = zoo.folder(tmp_path, "qwen3_moe"), experience(9)
    model = {"enable_gradient_checkpointing": checkpointing}
    engine = build_engine(process, path, model=model)
    watched_B = torch.arange(9) >= 6
    expected = load_metrics(plain_counts(engine, batch.select(range(6))))
    metrics = engine.train_minibatch(batch, PolicyLoss(), denominators(batch), rule=RULE, without_gradient_B=watched_B)
    assert {name: metrics[name].value for name in expected} == {name: m.value for name, m in expected.items()}


def test_dense_and_padded_models_report_none(process: ProcessInfo, tmp_path: Path) -> None:
    batch = experience(4)
    for name, model in (("qwen3", {}), ("qwen3_moe", {"use_remove_padding": False})):
        engine = build_engine(process, zoo.folder(tmp_path, name), model=model)
        metrics = engine.train_minibatch(batch, PolicyLoss(), denominators(batch), rule=tiny.ONE_BATCH)
        assert not [key for key in metrics if key.startswith("moe_")]
