"""Mixtures of experts in vLLM (its CPU build): weights from the training engine, twice, with every proof."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.engine_ends import Sync, within
from tests.unit.engine import tiny
from tests.unit.models import zoo
from tests.unit.rollout.tiny import build_for
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.models import families
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.weight_sync.verdict import WeightSyncError

MIXTURES = [name for name, row in families.FAMILIES.items() if families.VLLM in row.tested and "experts" in row.kind]
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}  # the one size that its kernel has
pytestmark = pytest.mark.engines  # each takes a start of vLLM


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    pytest.importorskip("vllm")
    yield tiny.single_process()
    shutdown_distributed()


@pytest.mark.parametrize("name", MIXTURES)
def test_every_sync_reaches_the_kernels(
    process: ProcessInfo, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM packs experts when it loads them; the second sync sends other weights and must be packed as well."""
    path = zoo.folder(tmp_path, name, **(LATENT if name == "deepseek_v3" else HEADS))
    engine, batch = tiny.build_engine(process, path), tiny.experience(9)
    rollout = build_for("vllm", ModelConfig(path=path), process, tokenizer_size=tiny.VOCAB)
    sync = within(engine, rollout, RolloutConfig(), process)
    for version in (1, 2):
        report = sync(version)
        assert report.num_read_back == report.num_tensors == len(engine.weight_names()) > 48
        assert report.probe_gap is not None and report.probe_gap < 1e-4
        engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)
    if name == "qwen3_moe":
        fault_is_found(rollout, sync, monkeypatch)
    rollout.shutdown()


def fault_is_found(rollout: RolloutEngine, sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the engine takes gate for up and up for gate, of every expert."""
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    load = rollout.load_weights

    def exchanged(stream: Iterator[tuple[str, Any]], version: int, **options: Any) -> None:
        parts = ((name, name.split(".")[-2], tensor) for name, tensor in stream)
        load(((name.replace(part, swap.get(part, part)), t) for name, part, t in parts), version, **options)

    monkeypatch.setattr(rollout, "load_weights", exchanged)
    with pytest.raises(WeightSyncError, match=r"differs in the rollout engine: .*experts\.0\.gate_proj"):
        sync(3)
