"""What tests of context parallelism run in each process: the same numbers with rows shared by chunks and without."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

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
RULE = MicroBatchRule(max_tokens=60)  # two micro-batches of a share of the rows
HEADS = {  # three are shared by neither two ranks nor four
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_size": 48,
    "max_position_embeddings": 1024,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen2", HEADS),
    "windows": ("gemma2", HEADS | {"sliding_window": 5}),  # in every second layer; soft-capped scores
}
WAYS: dict[str, dict[str, Any]] = {  # of the first model
    "checkpointed": {"model": {"enable_gradient_checkpointing": True}},
    "selective": {"model": {"enable_gradient_checkpointing": True, "recompute_granularity": "selective"}},
    "lora": {"model": {"lora_rank": 4, "lora_alpha": 8}},
    "apart": {"model": {"share_prompts": False}},
}


class Group:
    """This rank's place among those that share rows."""

    def __init__(self, process: ProcessInfo, context: int, ulysses: int = 1, fsdp_size: int = -1) -> None:
        self.process, self.context, self.ulysses, self.fsdp_size = process, context, ulysses, fsdp_size
        self.index, self.count = process.rank // (context * ulysses), process.world_size // (context * ulysses)

    def engine(self, path: str, **more: Any) -> FSDPEngine:
        fsdp = FSDPConfig(context_parallel_size=self.context, fsdp_size=self.fsdp_size)
        return build_engine(self.process, path, ulysses=self.ulysses, fsdp=fsdp, **more)

    def rows(self, batch: Experience) -> Experience:
        return batch.select(range(self.index, len(batch), self.count))

    def gradients(self, engine: FSDPEngine, batch: Experience, mine: Experience | None = None) -> dict[str, Tensor]:
        loss = PolicyLoss() if engine.kind == "policy" else ValueLoss()
        rows = self.rows(batch) if mine is None else mine
        return minibatch_gradients(engine, rows, loss, denominators(batch), rule=RULE)

    def step(self, engine: FSDPEngine, seed: int) -> float:
        batch = experience(7, seed=seed)
        metrics = engine.train_minibatch(self.rows(batch), PolicyLoss(), denominators(batch), rule=RULE)
        engine.advance_schedule()
        return metrics["grad_norm"].value


def batch_of(name: str = "") -> Experience:
    """Nine rows of three prompts; "long": rows that the attention of a CPU takes one by one, without products."""
    if name == "long":
        return experience(3, max_response=700, seed=5)
    return experience(9, rows_per_prompt=3, max_response=40)


def everything(group: Group, paths: dict[str, str], saved: str, others: str | None) -> dict[str, Any]:
    """others: a folder that another number of ranks has saved, to go on from."""
    batch, found = batch_of(), dict[str, Any]()
    for name, path in paths.items():
        found[f"gradients_{name}"] = group.gradients(engine := group.engine(path), batch)
        found[f"gradients_{name}_first"] = group.gradients(engine, batch, batch.select(range(9 * (not group.index))))
        found[f"gradients_{name}_long"] = group.gradients(engine, batch_of("long"))
        found[f"double_{name}"] = in_float64(group, path)
    path, mine = paths["plain"], group.rows(batch)
    for way, settings in WAYS.items():
        found[f"gradients_{way}"] = group.gradients(group.engine(path, **settings), batch)
    critic = group.engine(path, kind="value")
    found["gradients_critic"] = group.gradients(critic, batch)
    found["outputs"] = by_row(mine, critic.forward(mine, want=frozenset({"values"}), rule=RULE))
    engine = group.engine(path)
    want = frozenset({"log_probs", "entropy"})
    found["outputs"] |= by_row(mine, engine.forward(mine, want=want, rule=RULE, temperature=0.7))
    found["tokens"] = tokens_of(engine, batch.select([int(batch.num_tokens_B().argmax())]))
    return found | checkpoints(group, path, saved, others)


def checkpoints(group: Group, path: str, saved: str, others: str | None) -> dict[str, Any]:
    """Two steps, a checkpoint, one more step; and the last step from `others`."""
    engine = group.engine(path)
    before = weights(engine)
    norms = [group.step(engine, seed) for seed in range(2)]
    engine.save(saved, contents=[*ALL, "hf_model"])
    found: dict[str, Any] = {"norms": [*norms, group.step(engine, 2)], "uninterrupted": weights(engine)}
    found["change"] = {name: tensor - before[name] for name, tensor in found["uninterrupted"].items()}
    if others is not None:
        found["resumed"] = resumed(group, path, others)
    return found


def resumed(group: Group, path: str, saved: str) -> dict[str, Tensor]:
    """Weights after the third step, from the checkpoint of two."""
    engine = group.engine(path, seed=50)
    engine.load(saved, contents=ALL)
    group.step(engine, 2)
    return weights(engine)


def in_float64(group: Group, path: str) -> dict[str, Tensor]:
    """Gradients in a precision that no key offers."""
    batch = batch_of()
    with mock.patch.object(sharded_model, "dtype_of", lambda name: torch.float64):
        engine = group.engine(path)
    engine.accumulate(group.rows(batch), Objective(PolicyLoss(), denominators(batch), temperature=1.0), RULE)
    return {name: gradient.clone() for name, gradient in engine.sharding.full_gradients(torch.float64)}


def tokens_of(engine: FSDPEngine, row: Experience) -> int:
    """Tokens that pass the layers here where there is one row, of more tokens than a rank's share of the budget."""
    seen, lengths = list[int](), int(row.num_tokens_B()) - 1
    layer = next(part for name, part in engine.model.named_modules() if name.endswith("layers.0"))
    assert isinstance(layer, nn.Module)
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    engine.train_minibatch(row, PolicyLoss(), denominators(row), rule=MicroBatchRule(max_tokens=lengths))
    hook.remove()
    return max(seen) * 1000 + lengths


def two(process: ProcessInfo, paths: dict[str, str], saved: str, others: str) -> dict[str, Any]:
    return everything(Group(process, 2), paths, saved, others)


def four(process: ProcessInfo, paths: dict[str, str], saved: str, others: str) -> dict[str, Any]:
    """Rows shared by all four; by two and two; of two copies of the model; by two, with heads by two more."""
    found, batch = everything(Group(process, 4), paths, saved, others), batch_of()
    for name, group in {"groups": Group(process, 2), "copies": Group(process, 2, fsdp_size=2)}.items():
        found[f"meshes_{name}"] = group.gradients(engine := group.engine(paths["plain"]), batch)
        found[f"meshes_{name}_first"] = group.gradients(engine, batch, batch.select(range(9 * (not group.index))))
    group, heads = Group(process, 2, ulysses=2), {"override_config": {"num_attention_heads": 2}}
    found["ulysses"] = group.gradients(group.engine(paths["plain"], model=heads), batch)
    return found
