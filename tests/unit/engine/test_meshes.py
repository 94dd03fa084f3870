"""Every axis of the mesh, and three at once on eight ranks, against one rank in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine import mesh_scenarios as scenarios
from tests.unit.engine import tiny
from tests.unit.engine.mesh_scenarios import Mesh
from tests.unit.engine.tiny import assert_same, by_parameter
from tests.unit.models import zoo
from verl_like.config.mesh import MeshSizes
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
    "replicate x pipe x ulysses": {"fsdp_size": 4, "pipe": 2, "ulysses": 2},
    "replicate x pipe x tensor": {"fsdp_size": 4, "pipe": 2, "tensor": 2},
    "replicate x pipe x expert": {"fsdp_size": 4, "pipe": 2, "expert": 2},
    "shard x pipe x expert": {"pipe": 2, "expert": 2},
    "pipe x context x ulysses": {"pipe": 2, "context": 2, "ulysses": 2},
    "pipe x expert x context": {"pipe": 2, "expert": 2, "context": 2},
    "pipe x expert x tensor": {"pipe": 2, "expert": 4, "tensor": 2},
}
BESIDE_STAGES: dict[str, Mesh] = {  # on four ranks
    "shard": {"pipe": 2},
    "pieces": {"pipe": 2, "virtual": 2, "context": 2},
    **{name: {"pipe": 2, name: 2} for name in ("ulysses", "context", "tensor", "expert")},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("meshes")
    plain = tiny.model_folder(folder, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4)
    return {"plain": plain, "experts": zoo.folder(folder / "experts", "qwen3_moe", num_experts=8)}


@pytest.mark.engines
def test_three_plain_steps_change_the_weights_as_one_ranks(
    process: ProcessInfo, paths: dict[str, str], tmp_path: Path
) -> None:
    alike(process, paths, AXES, scenarios.change_by_sgd, 2, tmp_path, 1e-6)


@pytest.mark.engines
def test_every_axis_goes_beside_stages(process: ProcessInfo, paths: dict[str, str], tmp_path: Path) -> None:
    """Steps of AdamW, checkpoints both ways, late gradients, adapters, the critic and outputs are one rank's."""
    one = {name: scenarios.trains(process, path, {}, f"{tmp_path}/one_{name}", None) for name, path in paths.items()}
    meshes, saved, others = BESIDE_STAGES, f"{tmp_path}/four", f"{tmp_path}/one"
    four = tiny.spawn_ranks(4, scenarios.beside_stages, tmp_path / "ranks", paths, meshes, saved, others)
    for name, mesh in meshes.items():
        kind = "experts" if "expert" in mesh else "plain"
        expected, sizes = one[kind], MeshSizes(world=4, **mesh)
        for number, found in enumerate(rank[name] for rank in four):
            for key, tolerance in {"late": 1e-10, "adapters": 1e-10, "critic": 1e-6}.items():  # values are float32
                by_parameter(found[f"gradients_{key}"], expected[f"gradients_{key}"], tolerance)
            by_parameter(found["change"], expected["change"], 1e-3)
            norms = [step["grad_norm"] for step in expected["told"]]
            assert [step["grad_norm"] for step in found["told"]] == pytest.approx(norms, rel=1e-6)
            assert_same(found["resumed"], expected["uninterrupted"], 1e-6)
            first, count = number // sizes.ranks_per_row, sizes.data_parallel
            for output, rows in expected["outputs"].items():
                torch.testing.assert_close(found["outputs"][output], rows[first::count], rtol=0, atol=1e-6)
        told = [sum(rank[name]["told"][step].get("pg_loss", 0) for rank in four) for step in range(3)]
        assert told == pytest.approx([step["pg_loss"] for step in expected["told"]], rel=1e-6)
        held = [set(rank[name]["held"]) for rank in four]
        assert held[0] == held[2] and held[1] == held[3]
        assert not held[0] & held[1] and held[0] | held[1] == set(expected["held"])
        again = scenarios.Place(process, {}).resumed(paths[kind], f"{saved}_{name}")
        assert_same(again, expected["uninterrupted"], 1e-6)


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
