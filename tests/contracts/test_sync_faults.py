"""The table of docs/weight_sync.md: whatever changes a stored value is caught by the sync's proof, and named."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contracts.sync_faults import DROPPED, FAULTS, LEARNING_RATES, SIDES, Plant
from tests.contracts.two_ranks import run_on_two_ranks
from tests.unit.rollout.tiny import TOKENIZER_SIZE, build_for, single_process, tiny_model
from verl_like.config import ModelConfig, RolloutConfig
from verl_like.config.roles import RoleConfig
from verl_like.config.rollout import EngineKwargsConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed
from verl_like.rollout import vllm_compat
from verl_like.rollout.hf import HFRolloutEngine
from verl_like.weight_sync.sync import WeightSync, WeightSyncError

ENGINES = [
    ("hf", "float32"),
    ("hf", "bfloat16"),
    ("vllm", "float32"),
    pytest.param(("vllm", "bfloat16"), marks=pytest.mark.engines),
]


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
    name, dtype = request.param
    if name == "vllm":
        pytest.importorskip("vllm")
    made = planting(name, dtype, process, folder)
    yield made
    made.rollout.shutdown()


def planting(name: str, dtype: str, process: ProcessInfo, folder: Path, tp: int = 1) -> Plant:
    model = ModelConfig(path=str(folder))
    blocks = EngineKwargsConfig(vllm={"block_size": 32})  # vLLM's own on a CPU have 128 tokens: no prompt here has one
    settings = {"dtype": dtype, "tensor_model_parallel_size": tp, "max_num_seqs": 32, "engine_kwargs": blocks}
    rollout = build_for(name, model, process, tokenizer_size=TOKENIZER_SIZE, **settings)
    engine = FSDPEngine(RoleConfig(model=model), process, tokenizer_size=TOKENIZER_SIZE)
    return Plant(engine, rollout, WeightSync(engine, rollout, RolloutConfig(), process))


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


def test_a_cache_that_is_not_emptied(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM alone has one; no log-prob would tell: prompts to be scored do not read it."""
    plant.sync.sync(1000)
    if isinstance(plant.rollout, HFRolloutEngine):
        assert plant.rollout.cached_tokens() == 0
        return
    assert plant.rollout.cached_tokens() == 96
    monkeypatch.setattr(vllm_compat, "drop_caches", lambda llm: None)
    with pytest.raises(WeightSyncError, match=r"prefix cache was not emptied: \d+ tokens"):
        plant.sync.sync(1001)
    monkeypatch.undo()
    plant.sync.sync(1002)


@pytest.mark.engines
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["vllm-float32", "vllm-bfloat16"])
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
        plant.rollout.shutdown()
        shutdown_distributed()
    said = {"cases": {name: (case.should, case.named) for name, case in cases.items()}, "dropped": dropped}
    (folder / f"rank{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
