"""Engines in float64 with any mesh, and what they give: gradients, and changes of weights by plain steps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.unit.engine.row_groups import RowGroup
from tests.unit.engine.scenarios import by_row
from tests.unit.engine.tensor_scenarios import trained_lora
from tests.unit.engine.tiny import PolicyLoss, ValueLoss, WideTorch, denominators, experience, wide_engine
from verl_like.batch import Experience
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig
from verl_like.config.mesh import MeshSizes
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

    def engine(self, path: str, schedule: str = "1f1b", model: dict[str, Any] | None = None, **more: Any) -> FSDPEngine:
        sizes = {f"{name}_parallel_size": getattr(self.sizes, name) for name in ("context", "tensor", "expert")}
        sizes |= {"pipeline_parallel_size": self.sizes.pipe, "virtual_pipeline_size": self.sizes.virtual}
        fsdp = FSDPConfig(fsdp_size=self.sizes.fsdp_size, pipeline_schedule=schedule, **sizes)
        settings = {"experts_implementation": "eager"} | (model or {})  # grouped products have no such precision
        return wide_engine(self.process, path, ulysses=self.sizes.ulysses, fsdp=fsdp, model=settings, **more)


# Norms and router are written for float32: there a last bit of a sum would tip 1e-7.
wide = mock.patch.object(modeling_qwen3_moe, "torch", WideTorch())


@wide
def gradients(process: ProcessInfo, path: str, mesh: Mesh) -> dict[str, Tensor]:
    return in_full(place := Place(process, mesh), place.engine(path))


def in_full(place: Place, engine: FSDPEngine) -> dict[str, Tensor]:
    batch, loss = batch_of(), PolicyLoss() if engine.kind == "policy" else ValueLoss()
    engine.accumulate(place.rows(batch), Objective(loss, denominators(batch), temperature=1.0), RULE)
    return {name: gradient.clone() for name, gradient in engine.sharding.full_gradients(torch.float64)}


def batch_of() -> Experience:
    return experience(16, rows_per_prompt=2, max_response=40)


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


def beside_stages(
    process: ProcessInfo, paths: dict[str, str], meshes: dict[str, Mesh], saved: str, others: str
) -> dict[str, Any]:
    """What `trains` tells of each mesh. others: begin of the folders that one rank has saved, by model."""
    found = dict[str, Any]()
    for name, mesh in meshes.items():
        kind = "experts" if "expert" in mesh else "plain"
        found[name] = trains(process, paths[kind], mesh, f"{saved}_{name}", f"{others}_{kind}")
    return found


@wide
def trains(process: ProcessInfo, path: str, mesh: Mesh, saved: str, others: str | None) -> dict[str, Any]:
    """Three steps of AdamW, with a checkpoint; the third from what `others` saved; other gradients and outputs."""
    place = Place(process, mesh)
    found, batch = place.checkpoints(path, saved, others), place.rows(batch_of())
    schedule, lora = "1f1b" if mesh == {} or "tensor" in mesh else "zero_bubble", {"lora_rank": 4, "lora_alpha": 8}
    found["gradients_late"] = in_full(place, place.engine(path, schedule))
    adapted = trained_lora(place.engine(path, model=lora | {"target_modules": r".*(q_proj|o_proj)"}))
    found["gradients_adapters"] = in_full(place, adapted)
    found["gradients_critic"] = in_full(place, critic := place.engine(path, kind="value"))
    found["outputs"] = by_row(batch, critic.forward(batch, want=frozenset({"values"}), rule=RULE))
    engine = place.engine(path)
    found["outputs"] |= by_row(batch, engine.forward(batch, want=frozenset({"log_probs", "entropy"}), rule=RULE))
    found["held"] = sorted(name for name, _ in engine.sharding.root.named_parameters())
    return found
