"""Every type that the table of models claims for vLLM, in its CPU build, or for SGLang, on a CPU: weights from the
training engine, twice, with every proof, and the trainer's log-probs of what it samples."""

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
# Experts packed and latent attention, transformers' own model inside vLLM, layers with state
OFTEN = {"vllm": {"qwen3_moe", "deepseek_v3", "olmo2", "granitemoehybrid"}, "sglang": {"qwen3_moe"}}
CLAIMED = [
    pytest.param(
        engine,
        name,
        marks=[
            *([pytest.mark.sglang] if engine == "sglang" else []),
            *([] if name in OFTEN[engine] else [pytest.mark.slow]),
        ],
    )
    for engine, claim in (("vllm", families.VLLM), ("sglang", families.SGLANG))
    for name, row in TYPES.items()
    if claim in row.tested and name not in ELSEWHERE
]
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
TIED = HEADS | {"tie_word_embeddings": True}  # vLLM has no other head for them
DELTA = HEADS | {"linear_key_head_dim": 64, "linear_value_head_dim": 64}  # a size that its kernel has
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64},  # the one size that its kernel has
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "vaultgemma", "cohere", "lfm2", "lfm2_moe"), TIED),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), DELTA),
}
# What vLLM's kernel takes alone
IN_BFLOAT16 = {("vllm", "qwen3_next"), ("vllm", "qwen3_5_text")}
pytestmark = pytest.mark.engines  # each takes a start of an engine


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield tiny.single_process()
    shutdown_distributed()


@pytest.mark.parametrize(("kind", "name"), CLAIMED)
def test_every_sync_reaches_the_kernels(
    process: ProcessInfo, tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM packs weights when it loads them; the second sync sends others and must be packed as well."""
    if kind == "vllm":
        pytest.importorskip("vllm")
    path = zoo.folder(tmp_path, name, **OWN.get(name, HEADS))
    engine, batch = tiny.build_engine(process, path), tiny.experience(9)
    settings: dict[str, Any] = {"dtype": "bfloat16" if (kind, name) in IN_BFLOAT16 else "float32"}
    rollout = build_for(kind, ModelConfig(path=path), process, tokenizer_size=tiny.VOCAB, **settings)
    sync, names = within(engine, rollout, RolloutConfig(**settings), process), engine.weight_names()
    rounding = rounding_of(engine, path, process) if (kind, name) in IN_BFLOAT16 else None
    for version in (1, 2):
        report = sync(version)
        assert report.num_tensors == len(names)
        unread = names.keys() - {found for found, _ in rollout.weight_checksums(names)}
        assert report.num_read_back == len(names) - len(unread)
        assert all(each.endswith(".A_log") for each in unread)  # vLLM keeps -exp(A_log) of Mamba layers
        assert report.probe_gap is not None and report.probe_gap_mean is not None
        assert report.probe_gap < 1e-4 if rounding is None else report.probe_gap_mean < 2 * rounding
        rows = generated(rollout)
        trained_T = engine.forward(rows, want=frozenset({"log_probs"}), rule=tiny.ONE_BATCH)["log_probs"]
        assert rows.rollout_log_probs_T is not None
        gap_T = (trained_T - rows.rollout_log_probs_T)[rows.response_mask_T].abs()
        assert float(gap_T.max()) < 1e-4 if rounding is None else float(gap_T.mean()) < 2 * rounding
        engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)
    if name == "qwen3_moe":
        fault_is_found(rollout, sync, monkeypatch)
    rollout.shutdown()


def rounding_of(engine: Any, path: str, process: ProcessInfo) -> float:
    """Mean difference of log-probs that bfloat16 makes by itself: transformers' model in it, against the trainer's."""
    plain = build_for("hf", ModelConfig(path=path), process, tokenizer_size=tiny.VOCAB, dtype="bfloat16")
    mean = within(engine, plain, RolloutConfig(dtype="bfloat16"), process)(1).probe_gap_mean
    plain.shutdown()
    assert mean is not None and mean > 0
    return mean


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
