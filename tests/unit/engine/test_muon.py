"""Muon steps as torch.optim.Muon beside AdamW does, and the same on two ranks with a part of the matrices each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.unit.engine import tiny
from tests.unit.engine.scenarios import RULE
from tests.unit.engine.tiny import PolicyLoss, build_engine, by_parameter, denominators, experience
from tests.unit.models import zoo
from verl_like.batch import Experience
from verl_like.config.fsdp import FSDPConfig
from verl_like.config.optim import OptimConfig, OptimizerName
from verl_like.engine import muon, optim, sharded_model
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import Objective
from verl_like.parallel.dist import ProcessInfo
from verl_like.parallel.sharding import local_tensor

NAME = "qwen3_moe"
SETTINGS: Any = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
WAYS: dict[str, dict[str, int]] = {
    "shards": {},
    "experts": {"expert_parallel_size": 2},
    "copies": {"fsdp_size": 1},
    "stages": {"pipeline_parallel_size": 2},
}
ROUNDED = 0.05  # of a weight's change in a step: bfloat16 products of float32 gradients


def engine_of(process: ProcessInfo, path: str, *, seed: int = 3, **sizes: int) -> FSDPEngine:
    return build_engine(
        process,
        path,
        fsdp=FSDPConfig(**sizes),  # type: ignore[arg-type]
        optim=OptimConfig(optimizer=OptimizerName.muon, **SETTINGS),
        model={"experts_implementation": "eager"},  # grouped products have no float64
        seed=seed,
    )


def my_rows(engine: FSDPEngine, batch: Experience) -> Experience:
    """Every second row where two ranks have rows of their own; stages have the same."""
    lines = engine.process.world_size // engine.role.fsdp.pipeline_parallel_size
    return batch.select(range(engine.process.rank * lines // engine.process.world_size, len(batch), lines))


def step(engine: FSDPEngine, seed: int) -> None:
    """A step without clipping, for which the norm of parts of the gradient is always taken in float32."""
    batch = experience(7, seed=seed)
    engine.accumulate(my_rows(engine, batch), Objective(PolicyLoss(), denominators(batch), temperature=1.0), RULE)
    assert engine.optimizer is not None
    engine.optimizer.step()
    engine.sharding.drop_gradients()


def whole(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.sharding.full_weights(torch.float64)}


@contextmanager
def in_float64() -> Iterator[None]:
    """All of it: gradients, states, orthogonalisation."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(sharded_model, "dtype_of", lambda name: torch.float64))
        patches.enter_context(mock.patch.object(muon, "PRECISION", torch.float64))
        yield


def one_step(process: ProcessInfo, path: str, **sizes: int) -> dict[str, Tensor]:
    """Change of the weights in a step as it is trained."""
    engine = engine_of(process, path, **sizes)
    before = whole(engine)
    batch = experience(7)
    engine.train_minibatch(my_rows(engine, batch), PolicyLoss(), denominators(batch), rule=RULE)
    return {name: tensor - before[name] for name, tensor in whole(engine).items()}


def resumed(process: ProcessInfo, path: str, saved: str, **sizes: int) -> dict[str, Tensor]:
    """Weights after the third step, from the checkpoint of two."""
    engine = engine_of(process, path, seed=50, **sizes)
    engine.load(saved, contents=["model", "optimizer"])
    step(engine, 2)
    return whole(engine)


@in_float64()
def exactly(process: ProcessInfo, path: str, saved: str, others: str | None, **sizes: int) -> dict[str, Any]:
    """Change after three steps, a checkpoint of two on the way; the third one from what `others` have saved."""
    engine = engine_of(process, path, **sizes)
    before = whole(engine)
    for seed in range(2):
        step(engine, seed)
    engine.save(saved, contents=["model", "optimizer"])
    step(engine, 2)
    after = whole(engine)
    found: dict[str, Any] = {"change": {name: after[name] - before[name] for name in after}, "after": after}
    return found if others is None else found | {"resumed": resumed(process, path, others, **sizes)}


def two_ranks(process: ProcessInfo, path: str, one: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"exact": {}, "rounded": {}}
    for way, sizes in WAYS.items():
        found["exact"][way] = exactly(process, path, f"{folder}/{way}", one, **sizes)
        found["rounded"][way] = one_step(process, path, **sizes)
    with mock.patch.object(muon, "_orthogonalised_shards", lambda _, shards: [muon.orthogonalised(s) for s in shards]):
        found["planted"] = one_step(process, path)
    return found | {"double": double(process)}


def double(process: ProcessInfo) -> list[Tensor]:
    """Three steps in float64 of an odd matrix, a wide one, a vector and a stack, from gradients all ranks know."""
    mesh, noise = init_device_mesh("cpu", (process.world_size,), mesh_dim_names=("shard",)), torch.Generator()
    noise.manual_seed(1)
    shapes = (5, 3), (4, 9), (7,), (3, 4, 6), (1, 8), (6, 6)
    start = [torch.randn(shape, generator=noise, dtype=torch.float64) for shape in shapes]
    parameters = [nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)])) for tensor in start]
    config = OptimConfig(optimizer=OptimizerName.muon, **SETTINGS)
    built = optim.build_optimizer(parameters, config, [p for p in parameters if p.ndim > 1])
    for _ in range(3):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
            parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        built.step()
    return [parameter.full_tensor().detach() for parameter in parameters]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("muon")


@pytest.fixture(scope="module")
def path(folder: Path) -> str:
    return zoo.folder(folder / NAME, NAME)


@pytest.fixture(scope="module")
def one(process: ProcessInfo, path: str, folder: Path) -> dict[str, Any]:
    return exactly(process, path, str(folder / "one"), None)


@pytest.fixture(scope="module")
def two(path: str, folder: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    return tiny.spawn_ranks(2, two_ranks, folder / "ranks", path, str(folder / "one"), str(folder))


def test_one_rank_takes_the_steps_of_torch(process: ProcessInfo, path: str) -> None:
    """Bit for bit, from gradients drawn at random; each expert's matrices are given to torch one by one."""
    engine = engine_of(process, path)
    chosen = {id(p) for p in muon.matrices_of(engine.model.hf)}
    named = dict(engine.model.named_parameters())
    muons = {name for name, p in named.items() if id(p) in chosen}
    ends = ("q_proj.weight", "o_proj.weight", "mlp.gate.weight", "gate_up_proj", "down_proj")
    assert all(any(name.endswith(end) for name in muons) for end in ends)
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in muons)
    mine: dict[str, list[nn.Parameter]] = {}
    for name, p in named.items():
        whole = local_tensor(p.detach()).clone()
        mine[name] = [nn.Parameter(part.clone()) for part in (whole if whole.ndim == 3 else [whole])]
    matrices = [p for name in muons for p in mine[name]]
    others = [p for name in named.keys() - muons for p in mine[name]]
    keys = {"lr": 1e-2, "weight_decay": 0.1}
    theirs = torch.optim.Muon(matrices, **keys, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, **keys, eps=1e-3, betas=(0.9, 0.999), fused=True)
    assert engine.optimizer is not None
    for _ in range(3):
        for name, p in named.items():
            p.grad = torch.randn_like(p)
            grad = local_tensor(p.grad).clone()
            for part, own in zip(grad if grad.ndim == 3 else [grad], mine[name], strict=True):
                own.grad = part
        for each in (engine.optimizer, theirs, adam):
            each.step()
        for name, p in named.items():
            now = local_tensor(p.detach())
            for part, own in zip(now if now.ndim == 3 else [now], mine[name], strict=True):
                assert torch.equal(part, own.detach()), name


def test_two_ranks_equal_one_in_float64(process: ProcessInfo, one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    """From given gradients, and whole engines each way apart."""
    alone = double(process)
    assert all(change.norm() > 0 for change in one["change"].values())
    for rank in two:
        for found, wanted in zip(rank["double"], alone, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        for way in WAYS:
            by_parameter(rank["exact"][way]["change"], one["change"], 1e-10)


def test_two_ranks_are_near_one_in_float32(process: ProcessInfo, path: str, two: list[dict[str, Any]]) -> None:
    """Rounding, which bfloat16 enlarges, and no more: parts of a matrix orthogonalised apart are far off."""
    alone = one_step(process, path)
    for way, change in two[0]["rounded"].items():
        assert max(gaps(change, alone).values()) < ROUNDED, way
    assert max(gaps(two[0]["planted"], alone).values()) > 10 * ROUNDED


def gaps(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items()}


def test_a_checkpoint_goes_on_on_another_mesh(
    process: ProcessInfo, path: str, folder: Path, one: dict[str, Any], two: list[dict[str, Any]]
) -> None:
    """What one rank has saved, each way on two; and what these have saved, on one."""
    for way in WAYS:
        for rank in two:
            by_parameter(rank["exact"][way]["resumed"], one["after"], 1e-10)
        with in_float64():
            by_parameter(resumed(process, path, str(folder / way)), one["after"], 1e-10)
