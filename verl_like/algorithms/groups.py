"""Statistics per prompt group. Groups are integer ids in any order: rows of a group need not be neighbours.

A row is a whole episode here: callers join those of several rows first (`batch.Episodes`).

Sums run in float64: group sizes are small, so a group of equal rewards has exactly its reward as mean and 0 as
deviation, and the result does not depend on the order of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Statistics per group (axis G, in order of id) and, with `row_group_B`, per row."""

    row_group_B: Tensor  # int64: which of the G groups each row is in
    size_G: Tensor  # int64
    mean_G: Tensor  # float64
    std_G: Tensor  # float64, unbiased; 0 for a group of one

    def of_rows(self, values_G: Tensor) -> Tensor:
        """The group's value for each row [B]."""
        return values_G[self.row_group_B]

    def sums_of(self, values_B: Tensor) -> Tensor:
        """Sum of other values over each group: float64 [G]."""
        return torch.zeros_like(self.mean_G).index_add(0, self.row_group_B, values_B.double())


def group_statistics(values_B: Tensor, group_B: Tensor) -> GroupStatistics:
    """Size, mean and unbiased standard deviation of `values_B` in each group."""
    ids, row_group_B = torch.unique(group_B, return_inverse=True)
    values = values_B.double()
    size_G = torch.bincount(row_group_B, minlength=len(ids))
    zeros_G = torch.zeros(len(ids), dtype=torch.float64, device=values.device)
    mean_G = zeros_G.index_add(0, row_group_B, values) / size_G
    squares_G = zeros_G.index_add(0, row_group_B, (values - mean_G[row_group_B]) ** 2)
    std_G = (squares_G / (size_G - 1).clamp(min=1)).sqrt()
    return GroupStatistics(row_group_B=row_group_B, size_G=size_G, mean_G=mean_G, std_G=std_G)


def signal_metrics(values_B: Tensor, group_B: Tensor) -> dict[str, float]:
    """Measure how many groups can teach a group-relative estimator anything.

    critic/group_zero_std_fraction: share of groups of two or more whose rewards are all equal (advantage 0).
    critic/group_singleton_fraction: share of groups with one row only (advantage 0 as well).
    """
    groups = group_statistics(values_B, group_B)
    several = groups.size_G > 1
    equal = several & (groups.std_G == 0)
    return {
        "critic/group_zero_std_fraction": (equal.sum() / several.sum().clamp(min=1)).item(),
        "critic/group_singleton_fraction": ((~several).sum() / max(len(several), 1)).item(),
    }
