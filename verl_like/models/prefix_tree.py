"""Rows that begin alike, packed as a tree: what several rows begin with is there, and computed, once.

Causal attention makes a token's hidden state depend on the tokens before it alone, so that it is the same in all rows
that are equal up to it: responses to one prompt, turns of an agent that each hold their whole context, forks of an
episode, retries, rows under one system prompt. A row of the packed input then holds only the tokens that no row before
it has in the same place, and goes on from the row that holds the token before them. Nothing changes but rounding.

Letters: B rows of a batch, S rows of the packed input (in packed order), K tokens of all whole rows one after the
other, T packed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl_like.batch import Sequences
from verl_like.flat_columns import bounds
from verl_like.models.token_layout import TokenLayout
from verl_like.parallel.balance import SharedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginnings:
    """Rows depth first: those that begin alike are neighbours.

    order: numbers of the rows.
    common: tokens that the row in this place and the one before it begin with; 0 in the first place. Two rows further
        apart have the least of those between them in common.
    """

    order: list[int]
    common: list[int]

    def repeated(self) -> list[int]:
        """Count the tokens at each row's beginning that another row has computed: by number of the row."""
        return [count for _, count in sorted(zip(self.order, self.common, strict=True))]


def beginnings(rows: Sequences, apart: Sequence[float] | None = None) -> Beginnings:
    """Find what rows begin with in common: equal tokens, with the same images and routes, without the last one of each.

    Nothing is predicted from a last token, so that it is not in the packed input. Routes (routes.py) differ where other
    weights sampled a token.

    apart: rows with different numbers have nothing in common; None: all may have.
    """
    tokens = _tokens(rows)
    keys = [(0.0 if apart is None else apart[b], row.tobytes()) for b, row in enumerate(tokens)]
    order = sorted(range(len(rows)), key=keys.__getitem__)  # any order of bytes puts those that begin alike together
    pairs = itertools.pairwise(order)
    common = [_common(tokens[a], tokens[b]) if keys[a][0] == keys[b][0] else 0 for a, b in pairs]
    if rows.routes_T is not None:
        routes = [part.flatten(1).numpy() for part in rows.routes_T.cpu().split(rows.num_tokens_B().tolist())]
        pairs = zip(itertools.pairwise(order), common, strict=True)
        common = [_common(routes[a][:count], routes[b][:count]) for (a, b), count in pairs]
    return Beginnings(order=order, common=[0, *common][: len(order)])


def _tokens(rows: Sequences) -> list[NDArray[np.int32]]:
    """Collect the tokens of each row but the last; the first of an image has a number of that image's own below 0."""
    prompts, responses = rows.prompt_ids_T.cpu().int().numpy(), rows.response_ids_T.cpu().int().numpy()
    spans = zip(
        itertools.pairwise(bounds(rows.prompt_length_B)),
        itertools.pairwise(bounds(rows.response_length_B)),
        strict=True,
    )
    found = [np.concatenate([prompts[a:b], responses[c:d]]) for (a, b), (c, d) in spans]
    images = dict[object, int]()
    for row, handles in zip(found, rows.media or (), strict=False):
        for handle in handles:
            row[handle.starts[0]] = -1 - images.setdefault(handle.image, len(images))
    return [row[: max(1, len(row) - 1)] for row in found]


def _common(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Count the tokens that both begin with; [n] or [n, ...]."""
    both = min(len(a), len(b))
    differs = (a[:both] != b[:both]).any(axis=tuple(range(1, a.ndim)))
    return int(differs.argmax()) if differs.any() else both


def shared_rows(
    rows: Sequences, apart: Sequence[float] | None = None, cost_of: Callable[[Tensor], Tensor] | None = None
) -> SharedRows:
    """Find what rows begin with in common, for balancing. Neighbours that share half a prompt are one group.

    Args:
        rows: the rows.
        apart: as in `beginnings`.
        cost_of: cost of so many tokens at the start of a row, int64 [B] -> [B]; None: tokens are the cost.
    """
    found, prompts = beginnings(rows, apart), rows.prompt_length_B.tolist()
    place, number, groups = [0] * len(rows), [0] * len(rows), 0
    for i, (row, common) in enumerate(zip(found.order, found.common, strict=True)):
        groups += i > 0 and 2 * common < min(prompts[row], prompts[found.order[i - 1]])
        place[row], number[row] = i, groups
    costs = found.common if cost_of is None else cost_of(torch.tensor(found.common)).tolist()
    return SharedRows(place=place, common=costs, number=number)


def branches(found: Beginnings) -> tuple[list[int], list[int]]:
    """Choose where each row goes on: the row that holds the token before its own ones, and the tokens before them.

    A row goes on from an earlier one; with 0 tokens before its own it goes on from none, and the row is its own number.
    """
    best = [(0, s) for s in range(len(found.order))]
    for order, common in ((found.order, found.common), (found.order[::-1], [0, *found.common[:0:-1]])):
        stack: list[tuple[int, int]] = []  # rows in ascending order, and what each has in common with the one below
        for s, count in zip(order, common, strict=True):
            while stack and stack[-1][0] > s:
                count = min(count, stack.pop()[1])
            if stack:
                best[s] = max(best[s], (count, stack[-1][0]), key=lambda pair: pair[0])
            stack.append((s, count))
    holders, shared = [s for _, s in best], [count for count, _ in best]
    for s, (count, holder) in enumerate(best):
        while count and count <= shared[holder]:  # that row has the token from another one
            holder = holders[holder]
        holders[s] = holder if count else s
    return holders, shared


def paths(length_S: Tensor, shared_S: Tensor, holder_S: Sequence[int]) -> list[Tensor]:
    """Find the packed place of every token of each whole row: int64 [length] each.

    Args:
        length_S: tokens of each whole row.
        shared_S: those at its beginning that other rows hold.
        holder_S: the row that holds the last of them; itself where there are none.
    """
    found: list[Tensor] = []
    start = 0
    for length, shared, holder in zip(length_S.tolist(), shared_S.tolist(), holder_S, strict=True):
        own = start + torch.arange(length - shared)
        found.append(torch.cat([found[holder][:shared], own]) if shared else own)
        start += length - shared
    return found


def path_layout(paths_S: Sequence[Tensor], shared_S: Sequence[int]) -> TokenLayout:
    """Lay out whole rows, each with a slot for every token on its path; a token's home is in the row that holds it.

    shared_S: tokens at the beginning of each row that other rows hold. Rows without own ones must have been left out.
    """
    starts = itertools.accumulate(map(len, paths_S), initial=0)
    own = [torch.arange(a + shared, a + len(path)) for a, path, shared in zip(starts, paths_S, shared_S, strict=False)]
    return TokenLayout.of(torch.cat(list(paths_S)), torch.cat(own))
