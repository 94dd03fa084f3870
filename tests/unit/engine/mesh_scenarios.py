"""Engines in float64 with any mesh, and what they give: gradients, and changes of weights by plain steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.unit.engine.row_groups import RowGroup
from tests.unit.engine.tiny import PolicyLoss, build_engine, denominators, experience
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig
from verl_like.config.mesh import MeshSizes
from verl_like.engine import sharded_model
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import Objective
from verl_like.parallel.dist import ProcessInfo

RULE = MicroBatchRule(max_tokens=60)
Mesh = dict[str, int]  # sizes by the names of MeshSizes; those left out are 1, and FSDP has what is left


class Place(RowGroup):
    """This rank's place in a mesh."""

    rule = RULE

    def __init__(self, process: ProcessInfo, mesh: Mesh) -> None:
        self.sizes = MeshSizes(world=process.world_size, **mesh)
        super().__init__(process, self.sizes.ranks_per_row)

    def engine(self, path: str, **more: Any) -> FSDPEngine:
        sizes = {f"{name}_parallel_size": getattr(self.sizes, name) for name in ("context", "tensor", "expert")}
        fsdp = FSDPConfig(fsdp_size=self.sizes.fsdp_size, pipeline_parallel_size=self.sizes.pipe, **sizes)
        with mock.patch.object(sharded_model, "dtype_of", lambda name: torch.float64):
            settings = {"experts_implementation": "eager"}  # grouped products have no such precision
            return build_engine(self.process, path, ulysses=self.sizes.ulysses, fsdp=fsdp, model=settings, **more)


class _Wide:
    """Torch for a model whose norms and router are written for float32: there a last bit of a sum would tip 1e-7."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


wide = mock.patch.object(modeling_qwen3_moe, "torch", _Wide())


@wide
def gradients(process: ProcessInfo, path: str, mesh: Mesh) -> dict[str, Tensor]:
    place, batch = Place(process, mesh), experience(16, rows_per_prompt=2, max_response=40)
    objective = Objective(PolicyLoss(), denominators(batch), temperature=1.0)
    (engine := place.engine(path)).accumulate(place.rows(batch), objective, RULE)
    return {name: gradient.clone() for name, gradient in engine.sharding.full_gradients(torch.float64)}


@wide
def change_by_sgd(process: ProcessInfo, path: str, mesh: Mesh) -> dict[str, Tensor]:
    """Change of the exported weights after three steps of torch's SGD, which no key offers."""
    place = Place(process, mesh)
    engine = place.engine(path)
    engine.optimizer = torch.optim.SGD(engine.sharding.parameters())
    before = exported(engine)
    for seed in range(3):
        place.step(engine, seed)
    return {name: tensor - before[name] for name, tensor in exported(engine).items()}


def exported(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights(torch.float64)}


def everything(process: ProcessInfo, paths: dict[str, str], meshes: dict[str, Mesh], what: Any) -> dict[str, Any]:
    """Run `what` with each mesh, of the mixture of experts where its name says so: what each gave."""
    return {
        name: what(process, paths["experts" if "expert" in mesh else "plain"], mesh) for name, mesh in meshes.items()
    }
