"""Rows to ranks and back (pure): the driver cuts a struct by token cost and joins the answers in the old order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl_like.batch import TensorStruct, pad_to_width
from verl_like.parallel.balance import balance_ranks
from verl_like.parallel.shared_balance import PromptsOfRows

Struct = TypeVar("Struct", bound=TensorStruct)


def rows_per_rank(
    costs: Sequence[float], num_ranks: int, *, balance: bool, prompts: PromptsOfRows | None = None
) -> list[list[int]]:
    """Row numbers for each rank: equal cost when `balance`, otherwise consecutive slices of equal count.

    prompts: rows of the same prompt cost less on the same rank.
    """
    if balance:
        return balance_ranks([float(cost) for cost in costs], num_ranks, prompts)
    bounds = [round(rank * len(costs) / num_ranks) for rank in range(num_ranks + 1)]
    return [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]


def split_rows(batch: Struct, shares: Sequence[Sequence[int]]) -> list[Struct]:
    """One struct per rank, without padding that its own rows do not need."""
    return [batch.select(torch.tensor(share, dtype=torch.long)).trim() for share in shares]


def join_rows(parts: Sequence[Struct], shares: Sequence[Sequence[int]], width: int) -> Struct:
    """Inverse of `split_rows`: rows in their old order, right-padded columns widened to `width`."""
    kept = [(part, share) for part, share in zip(parts, shares, strict=True) if len(share)]
    joined = type(kept[0][0]).concat([part for part, _ in kept])
    order = torch.tensor([row for _, share in kept for row in share])
    joined = joined.select(torch.argsort(order))
    widened: dict[str, Tensor] = {}
    column: Any
    for name, column in joined.columns().items():
        if torch.is_tensor(column) and column.ndim == 2:
            widened[name] = pad_to_width(column, width, "right", 0)
    return joined.replace(**widened)
