"""LoRA adapters beside the base weights, in every rollout engine: what arrives is proved, what does not is caught."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contracts.engine_ends import EngineHere, Sync, connect, elsewhere, failure, transfer, unload, within
from tests.contracts.two_ranks import run_on_two_ranks
from tests.unit.engine import tiny
from tests.unit.rollout.tiny import build_for
from verl_like.batch import Sequences
from verl_like.config import ModelConfig, OptimConfig, RolloutConfig
from verl_like.config.model import LoraConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.kit.bench.engine_process import (
    EngineSettings,
    receive,
    wanted,
)
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.plugins.vllm import lora
from verl_like.plugins.vllm.engine import VLLMRolloutEngine
from verl_like.rollout.base import RolloutEngine
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError, SamplingParams
from verl_like.weight_sync.source import WeightSource
from verl_like.weight_sync.verdict import WeightSyncError

Items = Iterator[tuple[str, Tensor]]

# Rank 6 is none of vLLM's (8 is the next), and alpha / rank is no power of two.
LORA: dict[str, Any] = {"lora_rank": 6, "lora_alpha": 10, "lora": LoraConfig(merge=False)}
REQUESTS = [
    GenerationRequest(request_id=f"r{i}", prompt_ids=[1 + i, 2, 3], sampling=SamplingParams(max_tokens=6), seed=i)
    for i in range(5)
]
MODULE = "model.layers.1.self_attn.{}_proj"
A, B = f"{MODULE.format('k')}.lora_A.weight", f"{MODULE.format('k')}.lora_B.weight"
NUM_ADAPTERS = 2 * 7 * 2  # layers, linear modules of each, A and B


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield tiny.single_process()
    shutdown_distributed()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, process: ProcessInfo) -> str:
    return tiny.trained_folder(tmp_path_factory.mktemp("model"), process, initializer_range=0.1)


def build_rollout(name: str, path: str, process: ProcessInfo, tp: int = 1, **changes: Any) -> RolloutEngine:
    model = ModelConfig(path=path, **(LORA | changes))
    settings = {"max_num_seqs": 32, "tensor_model_parallel_size": tp}
    return build_for(name, model, process, tokenizer_size=tiny.VOCAB, **settings)


@pytest.fixture(scope="module", params=["hf", "vllm"])
def rollout(request: pytest.FixtureRequest, process: ProcessInfo, path: str) -> Iterator[RolloutEngine]:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    engine = build_rollout(request.param, path, process)
    yield engine
    engine.shutdown()


def trainer(process: ProcessInfo, path: str, **changes: Any) -> FSDPEngine:
    settings: dict[str, Any] = {"optim": OptimConfig(lr=1e-2), "model": LORA} | changes
    return tiny.build_engine(process, path, **settings)


def train(engine: FSDPEngine, seed: int) -> None:
    batch = tiny.experience(9, seed=seed)
    engine.train_minibatch(batch, tiny.PolicyLoss(), tiny.denominators(batch), rule=tiny.ONE_BATCH)


def weight_sync(engine: FSDPEngine, rollout: RolloutEngine, process: ProcessInfo, **config: Any) -> Sync:
    return within(engine, rollout, RolloutConfig(**config), process)


def gap(engine: FSDPEngine, done: list[Completion]) -> float:
    """Largest difference between the sampler's log-probs and the trainer's."""
    rows = Sequences(
        prompt_ids_BP=torch.tensor([r.prompt_ids for r in REQUESTS], dtype=torch.int32),
        prompt_length_B=torch.full((len(done),), 3),
        response_ids_BR=torch.tensor([c.token_ids for c in done], dtype=torch.int32),
        response_length_B=torch.full((len(done),), 6),
        response_mask_BR=torch.ones(len(done), 6, dtype=torch.bool),
    )
    trained_T = engine.forward(rows, want=frozenset({"log_probs"}), rule=tiny.ONE_BATCH)["log_probs"]
    return float((rows.padded(trained_T) - torch.tensor([c.log_probs for c in done])).abs().max())


def test_base_weights_go_once_and_adapters_every_time(rollout: RolloutEngine, process: ProcessInfo, path: str) -> None:
    rollout.unload()
    engine = trainer(process, path)
    sync = weight_sync(engine, rollout, process)
    texts = []
    for version in range(1, 5):
        report = sync(version)
        first = version == 1
        assert report.form == ("apart" if first else "adapters")
        assert report.num_tensors == NUM_ADAPTERS + (len(engine.weight_names()) if first else 0)
        assert report.num_read_back == report.num_tensors
        assert report.probe_gap is not None and report.probe_gap < 1e-5
        done = rollout.generate(REQUESTS)  # fills the prefix cache, which the next sync must empty
        assert gap(engine, done) < 1e-5
        assert {int(v) for c in done for v in c.sampled.weight_versions} == {version}
        texts.append([c.token_ids for c in done])
        train(engine, version)
    assert gap(engine, rollout.generate(REQUESTS)) > 1e-2  # one update behind
    assert texts[0] != texts[-1]
    size = sum(shape.numel() for shape in engine.weight_names("adapters").values())
    assert sync(5).bytes == 4 * size


def test_adapters_and_merged_weights_are_the_same_policy(
    rollout: RolloutEngine, process: ProcessInfo, path: str
) -> None:
    rollout.unload()
    engine = trainer(process, path)
    for seed in range(3):
        train(engine, seed)
    sync = weight_sync(engine, rollout, process)
    sync(1)
    tokens = [r.prompt_ids + c.token_ids for r, c in zip(REQUESTS, rollout.generate(REQUESTS), strict=True)]
    merged = build_rollout("hf", path, process, lora=LoraConfig(merge=True))
    within(engine, merged, RolloutConfig(), process)(1)
    assert torch.allclose(torch.tensor(rollout.score(tokens)), torch.tensor(merged.score(tokens)), atol=1e-5)
    merged.shutdown()


def _drop(items: Items) -> Items:
    return ((n, t) for n, t in items if n != B)


def _swap(items: Items) -> Items:
    """k's adapter goes to v and v's to k."""
    k, v = MODULE.format("k"), MODULE.format("v")
    return ((n.replace(k, "?").replace(v, k).replace("?", v), t) for n, t in items)


def _unscaled(items: Items) -> Items:
    return ((n, t * 6 / 10 if n.endswith("lora_B.weight") else t) for n, t in items)


def _reshape(items: Items) -> Items:
    return ((n, t[:-1] if n == A else t) for n, t in items)


def _misshapen(export: Callable[..., Items], *args: Any) -> Items:
    return _reshape(export(*args))


def _twice(items: Items) -> Items:
    for name, tensor in items:
        yield name, tensor
        if name == A:
            yield name, tensor


def _base(items: Items) -> Items:
    yield from items
    yield f"{MODULE.format('k')}.weight", torch.zeros(32, 64)


def _nan(items: Items) -> Items:
    return ((n, t * float("nan") if n == B else t) for n, t in items)


def _die(items: Items) -> Items:
    for i, item in enumerate(items):
        if i == 7:
            raise OSError("trainer lost")
        yield item


FAULTS: dict[str, tuple[Callable[[Items], Items], str]] = {
    "dropped": (_drop, f"missing: {B}"),
    "swapped k and v": (_swap, f"differs from the trainer's shards: {MODULE.format('k')}"),
    "unscaled": (_unscaled, "differs from the trainer's shards: .*lora_B"),
    "shape": (_reshape, f"shape: {A}"),
    "duplicate": (_twice, f"duplicate: {A}"),
    "a base weight": (_base, f"unexpected: {MODULE.format('k')}.weight"),
    "nan": (_nan, f"differs from the trainer's shards: {B}"),
    "interrupted": (_die, "trainer lost"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught_and_base_weights_go_again(
    rollout: RolloutEngine, process: ProcessInfo, path: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, message = FAULTS[fault]
    rollout.unload()
    engine = trainer(process, path)
    for seed in range(2):
        train(engine, seed)
    sync = weight_sync(engine, rollout, process)
    sync(1)
    export = engine.export_weights
    with monkeypatch.context() as patch:
        patch.setattr(engine, "export_weights", lambda dtype, form: spoil(export(dtype, form)))
        with pytest.raises(WeightSyncError, match=message):
            sync(2)
    assert rollout.weight_version is None
    with pytest.raises(RolloutError, match="no weights"):
        rollout.generate(REQUESTS)
    report = sync(3)
    assert report.form == "apart"
    assert gap(engine, rollout.generate(REQUESTS)) < 1e-5


def test_an_engine_that_exchanges_two_adapters_is_caught_by_checksums(
    rollout: RolloutEngine, process: ProcessInfo, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = trainer(process, path)
    sync = weight_sync(engine, rollout, process)
    sync(1)
    load = rollout.load_weights
    monkeypatch.setattr(rollout, "load_weights", lambda stream, version, **how: load(_swap(stream), version, **how))
    with pytest.raises(WeightSyncError, match=r"differs in the rollout engine: model\.layers\.1\.self_attn"):
        sync(2)
    assert rollout.weight_version is None


def test_adapters_alone_are_refused_without_base_weights(
    rollout: RolloutEngine, process: ProcessInfo, path: str
) -> None:
    rollout.unload()
    stream = trainer(process, path).export_weights(torch.float32, "adapters")
    with pytest.raises(RuntimeError, match="without base weights"):
        rollout.load_weights(stream, 1, partial=True)
    assert rollout.weight_version is None


@pytest.mark.parametrize("kind", ["inproc", pytest.param("ipc", marks=pytest.mark.engines), "broadcast"])
def test_adapters_alone_on_every_channel(process: ProcessInfo, path: str, kind: str) -> None:
    """To an engine in another process: base weights once, and again when it holds something else than was sent."""
    settings = EngineSettings(
        rollout=RolloutConfig(name="hf", max_num_seqs=8, max_num_batched_tokens=64),
        model=ModelConfig(path=path, **LORA),
        tokenizer_size=tiny.VOCAB,
        max_model_len=128,
        run_id="lora-sync",
    )
    there = EngineHere(settings, process) if kind == "inproc" else elsewhere(settings)
    engine = trainer(process, path)
    source = WeightSource(engine, process, prove=True)
    channel = connect(kind, there, process.device, run_id="lora-sync", bucket_bytes=10_000)
    try:
        for version, form in enumerate(["apart", "adapters", "adapters"]):
            report = transfer(source, channel, there, version)
            assert (report.form, report.num_read_back) == (form, report.num_tensors)
            assert report.probe_gap is not None and report.probe_gap < 1e-5
            train(engine, version)
        asked = there.call(wanted)
        there.call(unload)
        received = there.begin(receive)
        sent = source.send(8, asked, channel)  # the sender does not know
        assert sent.form == "adapters"
        (problem,) = received().problems["rollout rank 0"]
        assert problem == "adapters came for weights that the engine does not hold: it has None"
        if kind != "inproc":
            channel.close()
            channel = connect(kind, there, process.device, run_id="lora-sync", bucket_bytes=10_000)
        assert transfer(source, channel, there, 9).form == "apart"
        assert transfer(WeightSource(engine, process, prove=True), channel, there, 10).form == "apart"
    finally:
        channel.close()
        there.shutdown()


@pytest.mark.parametrize("broken", ["half an adapter", "a base weight", "nothing"])
def test_the_engine_itself_refuses_what_is_no_adapter(
    rollout: RolloutEngine, process: ProcessInfo, path: str, broken: str
) -> None:
    """Below the ledger, which sees these faults first."""
    engine = trainer(process, path)
    weight_sync(engine, rollout, process)(1)
    good = dict(engine.export_weights(torch.float32, "adapters"))
    bad = {
        "half an adapter": {name: tensor for name, tensor in good.items() if name != B},
        "a base weight": good | {f"{MODULE.format('k')}.weight": torch.zeros(32, 64)},
        "nothing": {},
    }[broken]
    with pytest.raises(RuntimeError, match=r"adapter|did not come"):
        rollout.load_weights(iter(bad.items()), 2, partial=True)
    assert rollout.held is None


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["v_proj", "gate_proj"]], ids=lambda t: t[0])
def test_parts_of_fused_modules_alone(
    rollout: RolloutEngine, process: ProcessInfo, path: str, targets: list[str]
) -> None:
    """vLLM holds q, k and v in one module, and gate and up: the parts without an adapter stay as they are."""
    engine = trainer(process, path, model=LORA | {"target_modules": targets})
    own = None if isinstance(rollout, VLLMRolloutEngine) else build_rollout("hf", path, process, target_modules=targets)
    receiver = own or rollout
    receiver.unload()
    sync = weight_sync(engine, receiver, process)
    for version in (1, 2, 3):
        report = sync(version)
        assert report.num_read_back == report.num_tensors
        assert gap(engine, receiver.generate(REQUESTS)) < 1e-5
        train(engine, version)
    assert report.num_tensors == 8
    if own is not None:
        own.shutdown()


def test_a_resumed_trainer_gives_the_same_responses(
    rollout: RolloutEngine, process: ProcessInfo, path: str, tmp_path: Path
) -> None:
    rollout.unload()
    engine, contents = trainer(process, path), ["model", "optimizer", "extra"]
    train(engine, 0)
    engine.save(str(tmp_path), contents=contents)
    weight_sync(engine, rollout, process)(1)
    train(engine, 1)
    weight_sync(engine, rollout, process)(2)
    expected = rollout.generate(REQUESTS)
    resumed = trainer(process, path, seed=99)
    resumed.load(str(tmp_path), contents=contents)
    rollout.unload()  # as a worker does when it loads
    sync = weight_sync(resumed, rollout, process)
    assert sync(1).form == "apart"
    train(resumed, 1)
    assert sync(2).form == "adapters"
    got = rollout.generate(REQUESTS)
    assert [(c.token_ids, c.log_probs) for c in got] == [(c.token_ids, c.log_probs) for c in expected]


def test_ranks_of_vllm() -> None:
    pytest.importorskip("vllm")
    held = {rank: lora.engine_options(rank)["max_lora_rank"] for rank in (1, 2, 8, 9, 300, 512)}
    assert held == {1: 1, 2: 8, 8: 8, 9: 16, 300: 320, 512: 512}
    with pytest.raises(ValueError, match=r"lora_rank=513 .*up to rank 512; set model\.lora\.merge=True"):
        lora.engine_options(513)


@pytest.mark.engines
def test_two_ranks(tmp_path: Path, path: str) -> None:
    """FSDP2 over two ranks into a copy per rank (hf) and into one tensor-parallel replica (vllm)."""
    names = ["hf", "vllm"] if importlib.util.find_spec("vllm") else ["hf"]
    for out in run_on_two_ranks(__file__, tmp_path, path, ",".join(names)):
        for name in names:
            assert out[name]["forms"] == ["apart", "adapters", "adapters"]
            assert max(out[name]["gaps"]) < 1e-5
            assert "failed on rank 1. Rank 1: shape" in out[name]["error"]
            assert out[name]["version_after_error"] is None
            assert out[name]["form_after_error"] == "apart"
            assert out[name]["generated_gap"] < 1e-5


def rank_main(rank: int, port: int, folder: Path, path: str, names: list[str]) -> None:
    """One of two ranks: three syncs with an update between them, a fault on rank 1 alone, recovery; for each engine."""
    process = init_distributed(rank, 2, rank, 2, "127.0.0.1", port, "cpu")
    out: dict[str, Any] = {}
    for name in names:
        engine = trainer(process, path)
        export = engine.export_weights
        rollout = build_rollout(name, path, process, tp=2 if name == "vllm" else 1)
        sync = weight_sync(engine, rollout, process)
        reports = []
        for version in range(1, 4):
            reports.append(sync(version))
            train(engine, version)
        if rank == 1:
            engine.export_weights = partial(_misshapen, export)  # type: ignore[method-assign]
        error = failure(sync, 4)
        version_after_error = rollout.weight_version
        engine.export_weights = export  # type: ignore[method-assign]
        recovered = sync(5)
        follows = name == "vllm" and rank > 0  # a replica's first rank is given the requests
        done = [rollout.generate([] if follows else REQUESTS)]
        if name == "vllm":
            torch.distributed.broadcast_object_list(done, src=0)
        out[name] = {
            "forms": [report.form for report in reports],
            "gaps": [report.probe_gap for report in [*reports, recovered]],
            "error": error,
            "version_after_error": version_after_error,
            "form_after_error": recovered.form,
            "generated_gap": gap(engine, done[0]),
        }
        rollout.shutdown()
    shutdown_distributed()
    (folder / f"rank{rank}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5].split(","))
