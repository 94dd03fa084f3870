"""Cut of a batch's rows into mini-batches, one for each optimizer step (pure). Ranks are balanced afterwards."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from verl_like.batch import Denominators, Episodes, Experience
from verl_like.flat_columns import row_sums


def cut_minibatches(
    group_B: Tensor,
    num_mini_batches: int | None = None,
    prompts_per_mini_batch: int | None = None,
    *,
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
) -> list[Tensor]:
    """Cut rows into mini-batches of whole prompt groups, and return the row positions (int64) of each.

    Positions come in the order in which they were drawn. Groups need not have equal sizes, and their rows need not be
    neighbours; an episode is in one group, so that its rows share an optimizer step. Give exactly one of
    `num_mini_batches` and `prompts_per_mini_batch`.

    Args:
        group_B: prompt group of each row.
        num_mini_batches: divide the groups evenly; the last mini-batch takes the remainder, and there are never more
            mini-batches than groups.
        prompts_per_mini_batch: groups in each; the last mini-batch takes what is left.
        shuffle: draw another order of groups for each (seed, epoch).
        seed: seed of that order.
        epoch: number of the pass over the rows.
    """
    if (num_mini_batches is None) == (prompts_per_mini_batch is None):
        raise ValueError("give exactly one of num_mini_batches and prompts_per_mini_batch")
    if min(n for n in (num_mini_batches, prompts_per_mini_batch) if n is not None) < 1:
        raise ValueError(f"mini-batches must hold something: {num_mini_batches=}, {prompts_per_mini_batch=}")
    groups = _rows_by_group(group_B)
    if shuffle:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
    bounds = _bounds(len(groups), num_mini_batches, prompts_per_mini_batch)
    return [
        torch.tensor([row for rows in groups[start:stop] for row in rows], dtype=torch.long)
        for start, stop in itertools.pairwise(bounds)
    ]


def denominators_of(rows: Experience, max_response_length: int) -> Denominators:
    """Count the denominators of the losses of one mini-batch, the same on every rank."""
    return Denominators(
        num_tokens=int(rows.response_mask_T.sum()),
        num_sequences=len(Episodes.of(rows)),
        max_response_length=max_response_length,
    )


def count_episode_tokens(rows: Experience) -> Experience:
    """Add episode_tokens_B to the rows of a mini-batch, before they part to micro-batches and ranks."""
    if rows.episode_B is None:
        return rows
    episodes = Episodes.of(rows)
    tokens_E = episodes.sums(row_sums(rows.response_mask_T, rows.response_length_B))
    return rows.replace(episode_tokens_B=episodes.of_rows(tokens_E))


def _rows_by_group(group_B: Tensor) -> list[list[int]]:
    """Rows of each group; groups in order of their first row, which is the sampler's order."""
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(group_B.tolist()):
        rows.setdefault(group, []).append(row)
    return list(rows.values())


def _bounds(num_groups: int, num_mini_batches: int | None, prompts_per_mini_batch: int | None) -> list[int]:
    """Bounds of the mini-batches, counted in groups."""
    if num_mini_batches is not None:
        size = max(num_groups // num_mini_batches, 1)
        return [*range(0, min(num_mini_batches, num_groups) * size, size), num_groups]
    assert prompts_per_mini_batch is not None
    return [*range(0, num_groups, prompts_per_mini_batch), num_groups]
