"""Every axis of the mesh, and three at once on eight ranks, against one rank in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine import mesh_scenarios as scenarios
from tests.unit.engine import tiny
from tests.unit.engine.mesh_scenarios import Mesh
from tests.unit.engine.tiny import by_parameter
from tests.unit.models import zoo
from verl_like.parallel.dist import ProcessInfo

AXES: dict[str, Mesh] = {
    "shard": {},
    "replicate": {"fsdp_size": 1},
    **{name: {name: 2} for name in ("ulysses", "context", "tensor", "expert", "pipe")},
}
TRIPLES: dict[str, Mesh] = {  # on eight ranks, of which one, two or four groups have rows of their own
    "replicate x shard x ulysses": {"fsdp_size": 4, "ulysses": 2},
    "replicate x shard x context": {"fsdp_size": 4, "context": 2},
    "replicate x shard x tensor": {"fsdp_size": 4, "tensor": 2},
    "replicate x shard x expert": {"fsdp_size": 4, "expert": 2},
    "replicate x shard x pipe": {"fsdp_size": 4, "pipe": 2},
    "replicate x expert x ulysses": {"fsdp_size": 4, "expert": 2, "ulysses": 2},
    "shard x context x ulysses": {"context": 2, "ulysses": 2},
    "shard x expert x context": {"expert": 4, "context": 2},
    "shard x expert x tensor": {"expert": 4, "tensor": 2},
    "expert x context x ulysses": {"expert": 8, "context": 4, "ulysses": 2},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("meshes")
    plain = tiny.model_folder(folder, num_attention_heads=4, num_key_value_heads=2)
    return {"plain": plain, "experts": zoo.folder(folder / "experts", "qwen3_moe", num_experts=8)}


@pytest.mark.engines
def test_three_plain_steps_change_the_weights_as_one_ranks(
    process: ProcessInfo, paths: dict[str, str], tmp_path: Path
) -> None:
    alike(process, paths, AXES, scenarios.change_by_sgd, 2, tmp_path, 1e-6)


@pytest.mark.slow
def test_three_axes_give_one_ranks_gradients(process: ProcessInfo, paths: dict[str, str], tmp_path: Path) -> None:
    alike(process, paths, TRIPLES, scenarios.gradients, 8, tmp_path, 1e-10)


def alike(
    process: ProcessInfo,
    paths: dict[str, str],
    meshes: dict[str, Mesh],
    what: Any,
    num_ranks: int,
    folder: Path,
    tolerance: float,
) -> None:
    one = {name: what(process, path, {}) for name, path in paths.items()}
    for rank in tiny.spawn_ranks(num_ranks, scenarios.everything, folder, paths, meshes, what):
        for name, mesh in meshes.items():
            wanted = one["experts" if "expert" in mesh else "plain"]
            assert {tensor.dtype for tensor in rank[name].values()} == {torch.float64}
            by_parameter(rank[name], wanted, tolerance)
