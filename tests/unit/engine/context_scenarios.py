"""What tests of context parallelism run in each process: the same numbers with rows shared by chunks and without."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.unit.engine.row_groups import RowGroup
from tests.unit.engine.scenarios import by_row
from tests.unit.engine.tiny import PolicyLoss, build_engine, denominators, experience
from verl_like.batch import Experience
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.parallel.dist import ProcessInfo

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


class Group(RowGroup):
    """This rank's place among those that share rows by chunks, and by slices of these."""

    rule = RULE

    def __init__(self, process: ProcessInfo, context: int, ulysses: int = 1, fsdp_size: int = -1) -> None:
        super().__init__(process, context * ulysses)
        self.context, self.ulysses, self.fsdp_size = context, ulysses, fsdp_size

    def engine(self, path: str, **more: Any) -> FSDPEngine:
        fsdp = FSDPConfig(context_parallel_size=self.context, fsdp_size=self.fsdp_size)
        return build_engine(self.process, path, ulysses=self.ulysses, fsdp=fsdp, **more)


def batch_of(name: str = "") -> Experience:
    """Nine rows of three prompts; "long": rows that the attention of a CPU takes one by one, without products."""
    if name == "long":
        return experience(3, max_response=700, seed=5)
    return experience(9, rows_per_prompt=3, max_response=40)


def everything(group: RowGroup, paths: dict[str, str], saved: str, others: str | None) -> dict[str, Any]:
    """others: a folder that another number of ranks has saved, to go on from."""
    batch, found = batch_of(), dict[str, Any]()
    for name, path in paths.items():
        found[f"gradients_{name}"] = group.gradients(engine := group.engine(path), batch)
        found[f"gradients_{name}_first"] = group.gradients(engine, batch, batch.select(range(9 * (not group.index))))
        found[f"gradients_{name}_long"] = group.gradients(engine, batch_of("long"))
        found[f"double_{name}"] = group.in_float64(path, batch)
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
    return found | group.checkpoints(path, saved, others)


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
