"""Weight sync into every rollout engine: what arrives is proved, what does not arrive is caught."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.contracts.engine_ends import Sync, failure, within
from tests.contracts.two_ranks import fork_on_two_ranks, run_on_two_ranks
from tests.unit.rollout.tiny import (
    TOKENIZER_SIZE,
    FakeTrainEngine,
    Items,
    build,
    log_probs,
    single_process,
    tiny_model,
)
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.config.roles import RoleConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.rollout.base import EngineSpec, RolloutEngine
from verl_like.rollout.rollout_engine import GenerationRequest, RolloutError, SamplingParams
from verl_like.weight_sync.channel import TakesPart
from verl_like.weight_sync.receiver import WeightReceiver
from verl_like.weight_sync.source import WeightSource
from verl_like.weight_sync.verdict import WeightSyncError

REQUEST = GenerationRequest(request_id="r", prompt_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=4), seed=1)
K, V = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight"


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield single_process()
    shutdown_distributed()


SGLANG = pytest.param("sglang", marks=[pytest.mark.engines, pytest.mark.sglang])


@pytest.fixture(scope="module", params=["hf", SGLANG, "vllm"])
def rollout(
    request: pytest.FixtureRequest, process: ProcessInfo, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutEngine]:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    engine = build(request.param, tmp_path_factory.mktemp("model"), process)
    yield engine
    engine.shutdown()


def _sync(engine: FakeTrainEngine, rollout: RolloutEngine, process: ProcessInfo, **config: object) -> Sync:
    return within(cast(FSDPEngine, engine), rollout, RolloutConfig(**config), process)  # type: ignore[arg-type]


@pytest.mark.parametrize("load_format", ["dummy_dtensor", "dummy_hf"])
def test_proved_sync(rollout: RolloutEngine, process: ProcessInfo, load_format: str) -> None:
    engine = FakeTrainEngine(tiny_model(seed=3))
    sync = _sync(engine, rollout, process, load_format=load_format)
    report = sync(7)
    assert report.version == rollout.weight_version == 7
    assert report.num_tensors == len(engine.weight_names())
    assert report.bytes == sum(4 * shape.numel() for shape in engine.weight_names().values())
    assert report.num_read_back == report.num_tensors
    assert report.probe_gap is not None
    assert report.probe_gap < 1e-5
    done = rollout.generate([REQUEST])[0]
    expected = log_probs(engine.model, REQUEST.prompt_ids + done.token_ids)[2:]
    assert torch.allclose(torch.tensor(done.log_probs), expected, atol=1e-5)
    engine.model = tiny_model(seed=4)
    assert sync(8).probe_gap is not None
    assert rollout.weight_version == 8


def _drop(items: Items) -> Items:
    return ((n, t) for n, t in items if n != K)


def _swap(items: Items) -> Items:
    return (({K: V, V: K}.get(n, n), t) for n, t in items)


def _stale(items: Items) -> Items:
    old = tiny_model(seed=0).get_parameter(V).detach()
    return ((n, old if n == V else t) for n, t in items)


def _reshape(items: Items) -> Items:
    return ((n, t[:-1] if n == K else t) for n, t in items)


def _negate(items: Items) -> Items:
    """One row of one tensor: what the second of two tensor-parallel ranks holds."""
    return ((n, torch.cat([t[:-1], -t[-1:]]) if n == K else t) for n, t in items)


def _twice(items: Items) -> Items:
    for name, tensor in items:
        yield name, tensor
        if name == K:
            yield name, tensor


def _invent(items: Items) -> Items:
    yield from items
    yield "model.layers.9.self_attn.k_proj.weight", torch.zeros(64, 64)


def _nan(items: Items) -> Items:
    return ((n, t * float("nan") if n == V else t) for n, t in items)


def _die(items: Items) -> Items:
    for i, item in enumerate(items):
        if i == 7:
            raise OSError("trainer lost")
        yield item


FAULTS = {
    "dropped": (_drop, f"missing: {K}"),
    "swapped k and v": (_swap, f"differs from the trainer's shards: {K}"),
    "stale": (_stale, f"differs from the trainer's shards: {V}"),
    "shape": (_reshape, f"shape: {K}"),
    "duplicate": (_twice, f"duplicate: {K}"),
    "unexpected": (_invent, "unexpected: model.layers.9"),
    "nan": (_nan, f"differs from the trainer's shards: {V}"),
    "interrupted": (_die, "trainer lost"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("first", [True, False], ids=["first sync", "later sync"])
def test_faults_are_caught_and_a_full_sync_recovers(
    rollout: RolloutEngine, process: ProcessInfo, fault: str, first: bool
) -> None:
    spoil, message = FAULTS[fault]
    engine = FakeTrainEngine(tiny_model(seed=3))
    sync = _sync(engine, rollout, process)
    if not first:
        sync(1)
    engine.spoil = spoil
    with pytest.raises(WeightSyncError, match=message):
        sync(2)
    assert rollout.weight_version is None
    with pytest.raises(RolloutError, match="no weights"):
        rollout.generate([REQUEST])
    engine.spoil = lambda items: items
    assert (sync(3).probe_gap or 0.0) < 1e-5
    assert set(rollout.generate([REQUEST])[0].sampled.weight_versions) == {3}


def test_an_engine_that_loads_wrongly_is_caught_by_checksums(
    rollout: RolloutEngine, process: ProcessInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeTrainEngine(tiny_model(seed=3))
    name = "model.layers.0.self_attn.k_proj.bias"
    load = rollout.load_weights

    def load_wrongly(stream: Items, version: int, **how: Any) -> None:
        load(((n, t.flip(0) if n == name else t) for n, t in stream), version, **how)

    monkeypatch.setattr(rollout, "load_weights", load_wrongly)
    with pytest.raises(WeightSyncError, match=f"differs in the rollout engine: {name}"):
        _sync(engine, rollout, process)(1)
    assert rollout.weight_version is None


def test_an_optimizer_whose_steps_change_nothing_is_caught(rollout: RolloutEngine, process: ProcessInfo) -> None:
    """Planted: trainer and stream agree on old weights."""
    engine = FakeTrainEngine(tiny_model(seed=3))
    sync = _sync(engine, rollout, process)
    engine.changes = engine.changes.after_step(lr=1e-3, grad_norm=1.0, exact=True)
    assert sync(1).num_changed is None
    assert sync(2).num_changed == 0  # nobody says that something should have
    engine.changes = engine.changes.after_step(lr=1e-3, grad_norm=1.0, exact=True)
    with pytest.raises(WeightSyncError, match=f"none of {len(engine.weight_names())} tensors has changed"):
        sync(3)
    engine.model.get_parameter(K).data[0, 0] += 1e-6
    assert sync(4).num_changed == 1


def test_steps_lost_to_rounding_are_said(
    process: ProcessInfo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, rollout = FakeTrainEngine(tiny_model(seed=3)), build("hf", tmp_path, process, dtype="bfloat16")
    sync = _sync(engine, rollout, process)
    sync(1)
    engine.model.get_parameter(K).data.mul_(1 + 1e-7)
    engine.changes = engine.changes.after_step(lr=1e-3, grad_norm=1.0, exact=True)
    assert sync(2).num_changed == 0
    assert "no weight has changed in torch.bfloat16" in caplog.text
    rollout.shutdown()


def test_without_the_probe_names_are_still_accounted_for(rollout: RolloutEngine, process: ProcessInfo) -> None:
    engine = FakeTrainEngine(tiny_model(seed=3))
    sync = _sync(engine, rollout, process, sync_probe=False)
    report = sync(1)
    assert (report.probe_gap, report.num_read_back) == (None, 0)
    engine.spoil = _drop
    with pytest.raises(WeightSyncError, match="missing"):
        sync(2)


def test_without_proofs_all_ranks_name_the_weights_alike(rollout: RolloutEngine, process: ProcessInfo) -> None:
    """The driver compares what each rank of the trainer has sent with what each engine holds."""
    engine = FakeTrainEngine(tiny_model(seed=3))
    wanted = WeightReceiver(rollout, RolloutConfig(), process).wanted()
    ranks = [WeightSource(cast(FSDPEngine, engine), process, prove=False) for _ in range(2)]
    first = [source.send(1, wanted, TakesPart()).mark for source in ranks]
    engine.changes = engine.changes.after_load()
    second = [source.send(2, wanted, TakesPart()).mark for source in ranks]
    assert len({*first}) == len({*second}) == 1 and first != second


def test_tied_embeddings_are_sent_once(process: ProcessInfo, tmp_path_factory: pytest.TempPathFactory) -> None:
    from transformers import AutoConfig

    from verl_like.rollout.hf import HFRolloutEngine

    engine = FakeTrainEngine(tiny_model(seed=3, tie_word_embeddings=True))
    assert "lm_head.weight" not in engine.weight_names()
    folder = tmp_path_factory.mktemp("tied")
    engine.model.config.save_pretrained(folder)
    spec = EngineSpec(
        rollout=RolloutConfig(name="hf"),
        model=ModelConfig(path=str(folder)),
        process=process,
        hf_config=AutoConfig.from_pretrained(folder),
        dtype=torch.float32,
        tokenizer_size=70,
        max_model_len=64,
        seed=0,
        tokenizer=str(folder),
        run_id="",
    )
    rollout = HFRolloutEngine(spec)
    try:
        assert (_sync(engine, rollout, process)(1).probe_gap or 0.0) < 1e-5
    finally:
        rollout.shutdown()


@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=pytest.mark.engines)])  # two imports of vLLM
def test_sharded_trainer_and_two_ranks(tmp_path: Path, name: str) -> None:
    """FSDP2 over two ranks into a copy per rank (hf) and into one tensor-parallel replica (vllm): the gap is tiny, and
    a fault on one rank stops both."""
    if name == "vllm":
        pytest.importorskip("vllm")
    model = tiny_model(seed=3)
    model.save_pretrained(tmp_path / "model")
    on_two_ranks = fork_on_two_ranks if name == "hf" else run_on_two_ranks
    for rank, out in enumerate(on_two_ranks(__file__, tmp_path, name)):
        assert out["gap"] < 1e-5
        assert out["read_back"] == [len(FakeTrainEngine(model).weight_names())] * 2
        assert f"differs in the rollout engine: {K}" in out["loader_error"]
        assert "failed on rank 1. Rank 1: shape" in out["error"]
        assert out["version_after_error"] is None
        assert out["recovered_gap"] < 1e-5
        assert len(out["sampled"]) == (0 if name == "vllm" and rank else 1)
        for token_ids, sampled_log_probs in out["sampled"]:
            expected = log_probs(model, REQUEST.prompt_ids + token_ids)[2:]
            assert torch.allclose(torch.tensor(sampled_log_probs), expected, atol=1e-5)


def rank_main(rank: int, port: int, folder: Path, name: str) -> None:
    """One of two ranks: sync, a fault on rank 1 alone, recovery."""
    process = init_distributed(rank, 2, rank, 2, "127.0.0.1", port, "cpu")
    engine = FSDPEngine(
        RoleConfig(model=ModelConfig(path=str(folder / "model"))), process, tokenizer_size=TOKENIZER_SIZE
    )
    export = engine.export_weights
    rollout = build(name, folder / f"rollout{rank}", process, tensor_model_parallel_size=2 if name == "vllm" else 1)
    sync = within(cast(FSDPEngine, engine), rollout, RolloutConfig(), process)
    first = sync(1)
    if rank == 1:
        engine.export_weights = lambda dtype, form: _reshape(export(dtype, form))  # type: ignore[method-assign]
    error = failure(sync, 2)
    version = rollout.weight_version
    engine.export_weights = export  # type: ignore[method-assign]
    load = rollout.load_weights
    rollout.load_weights = lambda items, version, load=load, **how: load(_negate(items), version, **how)  # type: ignore[method-assign]
    loader_error = failure(sync, 3)
    rollout.load_weights = load  # type: ignore[method-assign]
    recovered = sync(4)
    asked = [] if name == "vllm" and rank else [REQUEST]  # a replica's first rank is given the requests
    done = rollout.generate(asked)
    out = {
        "gap": first.probe_gap,
        "read_back": [first.num_read_back, recovered.num_read_back],
        "loader_error": loader_error,
        "error": error,
        "version_after_error": version,
        "recovered_gap": recovered.probe_gap,
        "sampled": [(completion.token_ids, completion.log_probs) for completion in done],
    }
    rollout.shutdown()
    shutdown_distributed()
    (folder / f"rank{rank}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
