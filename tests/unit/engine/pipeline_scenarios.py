"""What tests of pipeline parallelism run in each process: the same numbers with layers in stages and without."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.unit.engine.scenarios import by_row
from tests.unit.engine.tiny import PolicyLoss, ValueLoss, build_engine, denominators, experience, weights
from verl_like.batch import Experience
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig
from verl_like.engine import sharded_model
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.microbatch import Objective
from verl_like.kit.selfcheck.check import minibatch_gradients
from verl_like.parallel.dist import ProcessInfo

ALL = ["model", "optimizer", "extra"]
RULE = MicroBatchRule(max_tokens=40)  # several micro-batches, of unlike lengths
WAYS: dict[str, dict[str, Any]] = {  # of the first model
    "gpipe": {"fsdp": {"pipeline_schedule": "gpipe"}},
    "kept": {"fsdp": {"reshard_after_forward": False, "sync_every_micro_batch": False}},
    "checkpointed": {"model": {"enable_gradient_checkpointing": True}},
    "padded": {"model": {"use_remove_padding": False}},
}


class Line:
    """This rank's place among the pipelines."""

    def __init__(self, process: ProcessInfo, stages: int, fsdp_size: int = -1) -> None:
        self.process, self.stages, self.fsdp_size = process, stages, fsdp_size
        self.index, self.count = process.rank // stages, process.world_size // stages

    def engine(self, path: str, fsdp: dict[str, Any] | None = None, **more: Any) -> FSDPEngine:
        sizes = {"pipeline_parallel_size": self.stages, "fsdp_size": self.fsdp_size}
        return build_engine(self.process, path, fsdp=FSDPConfig(**sizes, **(fsdp or {})), **more)

    def rows(self, batch: Experience) -> Experience:
        return batch.select(range(self.index, len(batch), self.count))

    def gradients(self, engine: FSDPEngine, batch: Experience, mine: Experience | None = None) -> dict[str, Tensor]:
        loss = PolicyLoss() if engine.kind == "policy" else ValueLoss()
        rows = self.rows(batch) if mine is None else mine
        return minibatch_gradients(engine, rows, loss, denominators(batch), rule=RULE)

    def step(self, engine: FSDPEngine, seed: int) -> dict[str, float]:
        batch = experience(7, seed=seed)
        metrics = engine.train_minibatch(self.rows(batch), PolicyLoss(), denominators(batch), rule=RULE)
        engine.advance_schedule()
        return {name: metrics[name].value for name in ("grad_norm", "pg_loss") if name in metrics}


def batch_of() -> Experience:
    return experience(9, rows_per_prompt=3, max_response=30)


def everything(line: Line, paths: dict[str, str], saved: str, others: str | None) -> dict[str, Any]:
    """others: a folder that another number of ranks has saved, to go on from."""
    batch, found = batch_of(), dict[str, Any]()
    for name, path in paths.items():
        found[f"gradients_{name}"] = line.gradients(engine := line.engine(path), batch)
        found[f"gradients_{name}_first"] = line.gradients(engine, batch, batch.select(range(9 * (not line.index))))
        found[f"double_{name}"] = in_float64(line, path)
        found |= {f"{key}_{name}": value for key, value in steps(line, path, f"{saved}_{name}", others).items()}
    path, mine = paths["plain"], line.rows(batch)
    for way, settings in WAYS.items():
        found[f"gradients_{way}"] = line.gradients(line.engine(path, **settings), batch)
    critic = line.engine(path, kind="value")
    found["gradients_critic"] = line.gradients(critic, batch)
    found["outputs"] = by_row(mine, critic.forward(mine, want=frozenset({"values"}), rule=RULE))
    engine = line.engine(path)
    want = frozenset({"log_probs", "entropy"})
    found["outputs"] |= by_row(mine, engine.forward(mine, want=want, rule=RULE, temperature=0.7))
    found["held"] = sorted(name for name, _ in engine.sharding.root.named_parameters())
    return found


def steps(line: Line, path: str, saved: str, others: str | None) -> dict[str, Any]:
    """Two steps, a checkpoint, one more step; and the last step from what `others` saved."""
    engine = line.engine(path)
    before = weights(engine)
    told = [line.step(engine, seed) for seed in range(2)]
    engine.save(saved, contents=[*ALL, "hf_model"])
    told.append(line.step(engine, 2))
    found: dict[str, Any] = {"told": told, "uninterrupted": weights(engine)}
    found["change"] = {name: tensor - before[name] for name, tensor in found["uninterrupted"].items()}
    if others is not None:
        found["resumed"] = resumed(line, path, f"{others}_{saved.rpartition('_')[2]}")
    return found


def resumed(line: Line, path: str, saved: str) -> dict[str, Tensor]:
    """Weights after the third step, from the checkpoint of two."""
    engine = line.engine(path, seed=50)
    engine.load(saved, contents=ALL)
    line.step(engine, 2)
    return weights(engine)


def in_float64(line: Line, path: str) -> dict[str, Tensor]:
    """Gradients in a precision that no key offers."""
    batch = batch_of()
    with mock.patch.object(sharded_model, "dtype_of", lambda name: torch.float64):
        engine = line.engine(path, model={"experts_implementation": "eager"})
    engine.accumulate(line.rows(batch), Objective(PolicyLoss(), denominators(batch), temperature=1.0), RULE)
    return {name: gradient.clone() for name, gradient in engine.sharding.full_gradients(torch.float64)}


def two(process: ProcessInfo, paths: dict[str, str], saved: str, others: str) -> dict[str, Any]:
    return everything(Line(process, 2), paths, saved, others)


def four(process: ProcessInfo, paths: dict[str, str], saved: str, others: str) -> dict[str, Any]:
    """Two pipelines that share the weights of their stages; two copies of the model; four stages."""
    found, batch = everything(Line(process, 2), paths, saved, others), batch_of()
    for name, line in {"copies": Line(process, 2, fsdp_size=2), "stages": Line(process, 4)}.items():
        engine = line.engine(paths["tied"])
        found[f"{name}_gradients"] = line.gradients(engine, batch)
        found[f"{name}_told"] = line.step(engine, 0)
    return found
