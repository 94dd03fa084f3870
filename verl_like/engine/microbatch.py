"""Cut of a rank's mini-batch into micro-batches that fit into memory, as many on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from verl_like.batch import Denominators, Metric, Sequences
from verl_like.engine.train_engine import LossFn
from verl_like.heartbeat import span
from verl_like.models.prefix_tree import beginnings, shared_rows
from verl_like.parallel.balance import micro_batches
from verl_like.parallel.dist import all_reduce_max

if TYPE_CHECKING:
    from verl_like.config.batch_plan import MicroBatchRule

Batch = TypeVar("Batch", bound=Sequences)


@dataclass(frozen=True, slots=True)
class Objective:
    """Loss, denominators and temperature of logits that the micro-batches of a mini-batch have in common."""

    loss_fn: LossFn
    denominators: Denominators
    temperature: float


def cut(batch: Batch, rule: MicroBatchRule, *, share_prompts: bool) -> list[tuple[list[int], Batch] | None]:
    """Cut rows into micro-batches: (row positions, rows) of each, None where this rank has run out of rows.

    Collective: every rank returns the same number, so that all take part in the same collectives of the sharded model.
    share_prompts: what rows begin with is packed once, and they are kept together for that.
    """
    shared = shared_rows(batch) if share_prompts and rule.max_tokens is not None and not rule.apart else None
    index = micro_batches(batch.num_tokens_B().tolist(), rule, shared)
    count = all_reduce_max(len(index))
    parts: list[tuple[list[int], Batch] | None] = [(rows, batch.select(rows)) for rows in index]
    return parts + [None] * (count - len(parts))


def told(part: tuple[list[int], Sequences] | None) -> AbstractContextManager[None]:
    """Tell the watchdog that a micro-batch that `cut` returned is running inside, and how large it is."""
    return span("micro-batch", amount=0 if part is None else sum(part[1].num_tokens_B().tolist()))


def set_apart(batch: Batch, apart_B: Tensor | None) -> tuple[Batch, Batch | None]:
    """Split the batch into (the other rows, the rows of `apart_B`); (batch, None) where `apart_B` is None."""
    if apart_B is None:
        return batch, None
    chosen_B = apart_B.cpu()
    return batch.select(~chosen_B), batch.select(chosen_B)


def computed_tokens(batch: Sequences) -> int:
    """Count the tokens of the rows, each beginning that several have once."""
    return int(batch.num_tokens_B().sum()) - sum(beginnings(batch).common)


def fill_metrics(
    parts: Sequence[tuple[list[int], Sequences] | None],
    watched: Sequences | None,
    rule: MicroBatchRule,
    *,
    share_prompts: bool,
) -> dict[str, Metric]:
    """Metrics of the cut into micro-batches.

    perf/micro_batches (of the rank with most), the share of the token budget that they use, the share of the tokens
    that needed no computation because another row begins with them, and of those without backward pass (`watched`).
    """
    rows = [part[1] for part in parts if part is not None]
    whole = [int(part.num_tokens_B().sum()) for part in rows]
    tokens = [computed_tokens(part) for part in rows] if share_prompts else whole
    metrics = {"perf/micro_batches": Metric(value=float(len(parts)), reduction="max")}
    if watched is not None:
        forward_only = int(watched.num_tokens_B().sum())
        total = forward_only + sum(whole)
        metrics["perf/forward_only_share"] = Metric(value=forward_only / max(total, 1), weight=total)
    if share_prompts and whole:
        metrics["perf/shared_token_share"] = Metric(value=1 - sum(tokens) / sum(whole), weight=sum(whole))
    if rule.max_tokens is not None and tokens:
        used = sum(min(count, rule.max_tokens) for count in tokens)
        metrics["perf/micro_batch_fill"] = Metric(value=used / (len(tokens) * rule.max_tokens), weight=len(tokens))
    return metrics


def zero_loss(outputs: dict[str, Tensor]) -> Tensor:
    """Zero that depends on all outputs: its backward pass runs through the whole model."""
    return torch.stack([output.sum() for output in outputs.values()]).sum() * 0.0


def check_vocabulary(token_ids: Tensor, vocab_size: int | None) -> None:
    """Check that the tokenizer knows every token id; raises ValueError otherwise."""
    if vocab_size is not None and token_ids.numel() and int(token_ids.max()) >= vocab_size:
        raise ValueError(
            f"a response holds token id {int(token_ids.max())}, but the tokenizer knows only {vocab_size} ids: "
            "the rollout engine must not sample ids of the padded vocabulary"
        )
