"""Dispatch of rows to ranks and back (pure): the driver cuts a struct by token cost and joins the answers in order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from verl_like.batch import Sequences, TensorStruct
from verl_like.models.cost import BACKWARD, ModelCost
from verl_like.models.prefix_tree import shared_rows
from verl_like.parallel.balance import SharedRows, balance_ranks

Struct = TypeVar("Struct", bound=TensorStruct)


def rows_per_rank(
    costs: Sequence[float], num_ranks: int, *, balance: bool, shared: SharedRows | None = None
) -> list[list[int]]:
    """Choose row numbers for each rank: equal cost when `balance`, otherwise consecutive slices of equal count.

    shared: rows that begin alike cost less on the same rank.
    """
    if balance:
        return balance_ranks([float(cost) for cost in costs], num_ranks, shared)
    bounds = [round(rank * len(costs) / num_ranks) for rank in range(num_ranks + 1)]
    return [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBalance:
    """Balance of a role's rows over its ranks.

    even: by cost; otherwise in consecutive slices.
    cost: of the role's model; None: tokens are the cost.
    share_prompts: rows that begin alike cost less on the same rank.
    """

    even: bool = True
    cost: ModelCost | None = None
    share_prompts: bool = False

    def shares(self, rows: Sequences, num_ranks: int, forward_only_B: Tensor | None = None) -> list[list[int]]:
        """Choose row numbers for each rank.

        forward_only_B: rows whose backward pass the update leaves out; None: all rows take the same passes.
        """
        if num_ranks == 1:
            return [list(range(len(rows)))]
        passes_B = torch.ones(len(rows), dtype=torch.float64)
        if forward_only_B is not None:
            passes_B = torch.where(forward_only_B, 1.0, 1.0 + BACKWARD).double()
        costs = (self._forward_B(rows.prompt_length_B, rows.response_length_B) * passes_B).tolist()
        shared = self._shared(rows, passes_B) if self.share_prompts and self.even else None
        return rows_per_rank(costs, num_ranks, balance=self.even, shared=shared)

    def _shared(self, rows: Sequences, passes_B: Tensor) -> SharedRows:
        """Find what rows begin with in common: those with and those without a backward pass are computed apart."""
        ordered_B = passes_B.sort().values  # as `beginnings` puts rows

        def cost_of(common_B: Tensor) -> Tensor:
            return self._forward_B(common_B, torch.zeros_like(common_B)) * ordered_B

        return shared_rows(rows, passes_B.tolist(), cost_of)

    def _forward_B(self, prompt_length_B: Tensor, response_length_B: Tensor) -> Tensor:
        """Cost of the forward pass of each row."""
        if self.cost is None:
            return (prompt_length_B + response_length_B).double()
        costs = self.cost.row_costs(prompt_length_B.tolist(), response_length_B.tolist())
        return torch.tensor(costs, dtype=torch.float64)


def split_rows(batch: Struct, shares: Sequence[Sequence[int]]) -> list[Struct]:
    """Split a batch into one struct per rank."""
    return [batch.select(share) for share in shares]


def join_rows(parts: Sequence[Struct], shares: Sequence[Sequence[int]]) -> Struct:
    """Join rows in their old order; the inverse of `split_rows`."""
    kept = [part for part, share in zip(parts, shares, strict=True) if len(share)]
    names = {tuple(part.columns()) for part in kept}
    if len(names) > 1:
        raise ValueError(f"ranks answered with different columns: {sorted(names)}")
    order = [row for share in shares for row in share]
    return type(parts[0]).concat(kept).select(torch.argsort(torch.tensor(order)))
