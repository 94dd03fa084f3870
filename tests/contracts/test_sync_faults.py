"""The table of docs/weight_sync.md: whatever changes a stored value is caught by the sync's proof, and named."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contracts.engine_ends import EngineHere, elsewhere
from tests.contracts.sync_faults import (
    DROPPED,
    FAULTS,
    LEARNING_RATES,
    RUN_ID,
    SIDES,
    Plant,
    cached_tokens,
    empty_cache,
    keep_cache,
)
from tests.contracts.two_ranks import run_on_two_ranks
from tests.unit.rollout.tiny import MAX_LEN, TOKENIZER_SIZE, single_process, tiny_model
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.config.roles import RoleConfig
from verl_like.config.rollout import EngineKwargsConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.kit.bench.engine_process import EngineSettings
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.weight_sync.verdict import WeightSyncError

ENGINES = [
    ("hf", "float32", "inproc"),
    ("hf", "bfloat16", "inproc"),
    ("vllm", "float32", "inproc"),
    ("hf", "float32", "ipc"),
    ("hf", "bfloat16", "broadcast"),
    *[
        pytest.param(case, marks=pytest.mark.engines)
        for case in [
            ("vllm", "bfloat16", "inproc"),
            ("hf", "bfloat16", "ipc"),
            ("hf", "float32", "broadcast"),
            ("vllm", "float32", "ipc"),
            ("vllm", "bfloat16", "broadcast"),
        ]
    ],
]
BUCKET = 60_000  # bytes; the model has 320 kB


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    yield single_process()
    shutdown_distributed()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(seed=3).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=ENGINES, ids=lambda p: "-".join(p))
def plant(request: pytest.FixtureRequest, process: ProcessInfo, folder: Path) -> Iterator[Plant]:
    name, dtype, kind = request.param
    if name == "vllm":
        pytest.importorskip("vllm")
    made = planting(name, dtype, process, folder, kind=kind)
    yield made
    made.shutdown()


def planting(name: str, dtype: str, process: ProcessInfo, folder: Path, tp: int = 1, kind: str = "inproc") -> Plant:
    model = ModelConfig(path=str(folder))
    blocks = EngineKwargsConfig(vllm={"block_size": 32})  # vLLM's own on a CPU have 128 tokens: no prompt here has one
    rollout = RolloutConfig(
        name=name,
        dtype=dtype,
        tensor_model_parallel_size=tp,
        enforce_eager=True,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        engine_kwargs=blocks,
    )
    settings = EngineSettings(
        rollout=rollout,
        model=model,
        tokenizer_size=TOKENIZER_SIZE,
        max_model_len=MAX_LEN,
        run_id=RUN_ID,
    )
    held = EngineHere(settings, process) if kind == "inproc" else elsewhere(settings)
    engine = FSDPEngine(RoleConfig(model=model), process, tokenizer_size=TOKENIZER_SIZE)
    return Plant(engine, held, kind, process, BUCKET)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_every_tensor_names_every_tensor(plant: Plant, fault: str, side: str) -> None:
    for lr in LEARNING_RATES:
        caught = plant.case(fault, side, lr)
        assert caught.should and sorted(caught.named) == sorted(caught.should)


@pytest.mark.parametrize("side", SIDES)
def test_a_tensor_that_does_not_come(plant: Plant, side: str) -> None:
    for name in DROPPED:
        problems = plant.dropped(name, side)
        assert any(name in problem for problem in problems), problems


def test_a_sync_that_does_nothing(plant: Plant) -> None:
    for lr in LEARNING_RATES:
        caught = plant.skipped(lr)
        assert caught.should and sorted(caught.named) == sorted(caught.should)


def test_a_cache_that_is_not_emptied(plant: Plant, request: pytest.FixtureRequest) -> None:
    """vLLM alone has one; no log-prob would tell: prompts to be scored do not read it."""
    plant.sync()
    if "hf" in request.node.name:
        assert plant.rollout.call(cached_tokens) == 0
        return
    assert plant.rollout.call(cached_tokens) == 96
    plant.rollout.call(keep_cache)
    with pytest.raises(WeightSyncError, match=r"prefix cache was not emptied: \d+ tokens"):
        plant.sync()
    plant.rollout.call(empty_cache)
    plant.sync()


@pytest.mark.engines
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", [pytest.param("vllm-float32", marks=pytest.mark.slow), "vllm-bfloat16"])
def test_two_ranks(tmp_path: Path, folder: Path, engine: str) -> None:
    """Shards on two ranks into one replica of vLLM on both; faults on both ranks, and on one alone."""
    dtype = engine.removeprefix("vllm-")
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vllm")
    for out in run_on_two_ranks(__file__, tmp_path, str(folder), dtype):
        assert len(out["cases"]) == 2 * len(FAULTS) * len(SIDES) + len(SIDES) + 2
        for case, (should, named) in out["cases"].items():
            assert should and sorted(named) == sorted(should), case
        for name, problems in out["dropped"].items():
            assert any(name in problem for problem in problems), problems


def rank_main(rank: int, port: int, folder: Path, model: Path, dtype: str) -> None:
    """One of two ranks: the whole table."""
    process = init_distributed(rank, 2, rank, 2, "127.0.0.1", port, "cpu")
    plant = planting("vllm", dtype, process, model, tp=2)
    try:
        cases = {
            f"{fault}, {side}, {lr}": plant.case(fault, side, lr)
            for fault in FAULTS
            for side in SIDES
            for lr in LEARNING_RATES
        }
        cases |= {f"skipped, {lr}": plant.skipped(lr) for lr in LEARNING_RATES}
        cases |= {f"stale on rank 1, {side}": plant.case("stale", side, 1e-6, here=rank == 1) for side in SIDES}
        dropped = {name: plant.dropped(name, "loader") for name in DROPPED}
    finally:  # or the process does not end
        plant.shutdown()
        shutdown_distributed()
    said = {"cases": {name: (case.should, case.named) for name, case in cases.items()}, "dropped": dropped}
    (folder / f"rank{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
