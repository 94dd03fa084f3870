"""What tests of several ranks run in each process: one function, comparable results on one rank and on two."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit.engine.tiny import PolicyLoss, build_engine, denominators, experience, weights
from verl_like.batch import Experience, Sequences
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.config.fsdp import FSDPConfig
from verl_like.engine.fsdp import FSDPEngine
from verl_like.engine.train_engine import LossFn
from verl_like.kit.selfcheck.check import minibatch_gradients
from verl_like.parallel.dist import ProcessInfo

RULE = MicroBatchRule(max_tokens=24)


def my_rows(process: ProcessInfo, batch: Experience, share: str) -> Experience:
    """share "even": every second row; "first": all rows on rank 0, none on the others."""
    if share == "first":
        return batch.select(range(len(batch) if process.rank == 0 else 0))
    return batch.select(range(process.rank, len(batch), process.world_size))


def gradients(
    engine: FSDPEngine, rows: Experience, whole: Experience, apart_B: Tensor | None = None, loss: LossFn | None = None
) -> dict[str, Tensor]:
    """Full gradient of one mini-batch, before clipping; the optimizer step itself is left out."""
    return minibatch_gradients(
        engine, rows, loss or PolicyLoss(), denominators(whole), rule=RULE, without_gradient_B=apart_B
    )


def update(process: ProcessInfo, path: str, save_to: str | None = None) -> dict[str, Any]:
    """Gradients, log-probs, three optimizer steps (in the second only rank 0 has rows), optionally a checkpoint."""
    batch = experience(9, rows_per_prompt=3)
    result: dict[str, Any] = {}
    engine = build_engine(process, path)
    result["gradients_even"] = gradients(engine, my_rows(process, batch, "even"), batch)
    result["gradients_first"] = gradients(engine, my_rows(process, batch, "first"), batch)
    once = build_engine(process, path, fsdp=FSDPConfig(sync_every_micro_batch=False))
    result["gradients_sync_last"] = gradients(once, my_rows(process, batch, "even"), batch)
    mine = my_rows(process, batch, "even")
    result["log_probs"] = by_row(mine, engine.forward(mine, want=frozenset({"log_probs"}), rule=RULE, temperature=0.7))[
        "log_probs"
    ]
    for seed, share in ((1, "even"), (2, "first"), (3, "even")):
        batch = experience(7, seed=seed)
        metrics = engine.train_minibatch(
            my_rows(process, batch, share), PolicyLoss(), denominators(batch), rule=RULE, temperature=0.9
        )
        engine.advance_schedule()
        result[f"grad_norm_{seed}"] = metrics["grad_norm"].value
        result.setdefault("weights_1", weights(engine))
    result["weights"] = weights(engine)
    if save_to is not None:
        engine.save(save_to, contents=["model", "optimizer", "extra", "hf_model"])
        result["weights_later"] = one_more_step(process, engine)
        if process.rank == process.world_size - 1:  # one number, on one rank
            next(iter(engine.sharding.model_state().values())).to_local().view(-1)[0] = float("nan")
        result["spoilt"] = engine.save(f"{save_to}/spoilt", contents=["model", "optimizer", "extra"])
    return result


def one_more_step(process: ProcessInfo, engine: FSDPEngine) -> dict[str, Tensor]:
    batch = experience(7, seed=4)
    engine.train_minibatch(my_rows(process, batch, "even"), PolicyLoss(), denominators(batch), rule=RULE)
    return weights(engine)


def non_finite_on_last_rank(process: ProcessInfo, path: str) -> dict[str, Any]:
    """A loss that is NaN on the last rank only: no rank may step."""
    engine = build_engine(process, path)
    before, batch = weights(engine), experience(4)
    factor = float("nan") if process.rank == process.world_size - 1 else 1.0
    metrics = engine.train_minibatch(
        my_rows(process, batch, "even"), PolicyLoss(factor), denominators(batch), rule=RULE
    )
    after = weights(engine)
    good = engine.train_minibatch(my_rows(process, batch, "even"), PolicyLoss(), denominators(batch), rule=RULE)
    return {
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "skipped": metrics["skipped_steps"].value,
        "skipped_after": good["skipped_steps"].value,
        "changed_after": not torch.equal(before["lm_head.weight"], weights(engine)["lm_head.weight"]),
    }


def hybrid_sharding(process: ProcessInfo, path: str) -> dict[str, Tensor]:
    """fsdp_size=1 on two ranks: pure replication."""
    engine = build_engine(process, path, fsdp=FSDPConfig(fsdp_size=1))
    batch = experience(9)
    dist.barrier()
    return gradients(engine, my_rows(process, batch, "even"), batch)


SEQUENCE_MODELS: dict[str, dict[str, Any]] = {
    "grouped": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "one_key_head": {"num_attention_heads": 4, "num_key_value_heads": 1},
}


def sequence_parallel(process: ProcessInfo, path: str, size: int) -> dict[str, Any]:
    """Each group of `size` ranks holds the same rows and a slice of the tokens; once only the first group has rows."""
    result: dict[str, Any] = {}
    index, groups = process.rank // size, process.world_size // size
    for name, override in SEQUENCE_MODELS.items():
        engine = build_engine(process, path, ulysses=size, model={"override_config": override})
        batch = experience(9, rows_per_prompt=3)
        mine = batch.select(range(index, len(batch), groups))
        result[name] = gradients(engine, mine, batch)
        alone = batch.select(range(len(batch) if index == 0 else 0))
        result[f"{name}_alone"] = gradients(engine, alone, batch)
    want = frozenset({"log_probs", "entropy"})
    result["outputs"] = by_row(mine, engine.forward(mine, want=want, rule=RULE, temperature=0.7))
    metrics = engine.train_minibatch(mine, PolicyLoss(), denominators(batch), rule=RULE)
    result["reports_loss"] = "pg_loss" in metrics
    result["grad_norm"] = metrics["grad_norm"].value
    checkpointed = {"override_config": override, "enable_gradient_checkpointing": True}
    engine = build_engine(process, path, ulysses=size, model=checkpointed)
    result["checkpointed"] = gradients(engine, mine, batch)
    critic = build_engine(process, path, ulysses=size, kind="value", model={"override_config": override})
    values = frozenset({"values"})
    result["values"] = by_row(mine, critic.forward(mine, want=values, rule=RULE))["values"]
    texts = whole_texts(batch).select(range(index, len(batch), groups))
    result["scores"] = by_row(texts, critic.forward(texts, want=values, rule=RULE))["values"]
    return result


def by_row(rows: Sequences, outputs: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """An engine's answers, row by row."""
    return {name: list(value.split(rows.response_length_B.tolist())) for name, value in outputs.items()}


def whole_texts(batch: Experience) -> Sequences:
    """Rows as the reward model gets them (trainer.roles): the prompts as whole texts, one placeholder as response."""
    one = torch.ones(len(batch), dtype=torch.int64)
    return Sequences(
        prompt_ids_BP=batch.prompt_ids_BP,
        prompt_length_B=batch.prompt_length_B,
        response_ids_BR=torch.zeros(len(batch), 1, dtype=torch.int32),
        response_length_B=one,
        response_mask_BR=one.bool()[:, None],
    )


def tied_and_checkpointed(process: ProcessInfo, path: str) -> dict[str, Tensor]:
    """Tied embeddings (one parameter of the root, used twice) under gradient checkpointing."""
    model = {"override_config": {"tie_word_embeddings": True}, "enable_gradient_checkpointing": True}
    engine, batch = build_engine(process, path, model=model), experience(9)
    return gradients(engine, my_rows(process, batch, "even"), batch)


def everything(process: ProcessInfo, path: str, save_to: str | None) -> dict[str, Any]:
    """All scenarios in one start of the processes."""
    return {
        "update": update(process, path, save_to),
        "non_finite": non_finite_on_last_rank(process, path),
        "hybrid": hybrid_sharding(process, path),
        "tied": tied_and_checkpointed(process, path),
    }
