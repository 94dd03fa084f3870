"""Every type that the table of models claims for vLLM, in its CPU build: weights from the training engine, twice, with
every proof, and the trainer's log-probs of what it samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.engine_ends import Sync, within
from tests.unit.engine import tiny
from tests.unit.engine.test_families_engine import generated
from tests.unit.models import zoo
from tests.unit.models.matrix import TYPES
from tests.unit.rollout.tiny import build_for
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.models import families
from verl_like.parallel.dist import ProcessInfo, shutdown_distributed
from verl_like.rollout.base import RolloutEngine
from verl_like.weight_sync.verdict import WeightSyncError

ELSEWHERE = {"qwen2", *families.VISION}  # test_weight_sync.py, test_rollout_engine.py, test_vision_rollout.py
CLAIMED = [name for name, row in TYPES.items() if families.VLLM in row.tested and name not in ELSEWHERE]
# Experts packed and latent attention, transformers' own model inside vLLM, layers with state
OFTEN = {"qwen3_moe", "deepseek_v3", "olmo2", "granitemoehybrid"}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
TIED = HEADS | {"tie_word_embeddings": True}  # vLLM has no other head for them
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64},  # the one size that its kernel has
    **dict.fromkeys(("gemma", "gemma2", "vaultgemma", "cohere", "lfm2", "lfm2_moe"), TIED),
}
pytestmark = pytest.mark.engines  # each takes a start of vLLM


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    pytest.importorskip("vllm")
    yield tiny.single_process()
    shutdown_distributed()


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in CLAIMED])
def test_every_sync_reaches_the_kernels(
    process: ProcessInfo, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM packs weights when it loads them; the second sync sends others and must be packed as well."""
    path, packed = zoo.folder(tmp_path, name, **OWN.get(name, HEADS)), TYPES[name].packed
    engine, batch = tiny.build_engine(process, path, model={"use_remove_padding": packed}), tiny.experience(9)
    config = ModelConfig(path=path, use_remove_padding=packed)
    rollout = build_for("vllm", config, process, tokenizer_size=tiny.VOCAB)
    sync, names = within(engine, rollout, RolloutConfig(), process), engine.weight_names()
    for version in (1, 2):
        report = sync(version)
        assert report.num_tensors == len(names)
        unread = names.keys() - {found for found, _ in rollout.weight_checksums(names)}
        assert report.num_read_back == len(names) - len(unread)
        assert all(each.endswith(".A_log") for each in unread)  # vLLM keeps -exp(A_log)
        assert report.probe_gap is not None and report.probe_gap < 1e-4
        rows = generated(rollout)
        trained_T = engine.forward(rows, want=frozenset({"log_probs"}), rule=tiny.ONE_BATCH)["log_probs"]
        assert rows.rollout_log_probs_T is not None
        assert float((trained_T - rows.rollout_log_probs_T)[rows.response_mask_T].abs().max()) < 1e-4
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
