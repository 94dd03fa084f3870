"""Rows that the hf engine decodes together, with the cache of what was computed for them: they join and leave it.

The columns of a cache that are a row's own are always its last ones, because every step adds one to each row. So two
caches join when the narrower one is padded on the left, and once the longest row has left, columns are cut off there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from verl_like.rollout.hf_cache import GrowingLayer
from verl_like.rollout.rows import Knobs, Row, draw_tokens

# Layers of a cache that can be joined, by exact type: what another keeps besides (an index of its keys, numbers in few
# bits) we would lose. States that are carried from token to token have no columns at all.
JOINABLE = frozenset(
    {
        "GrowingLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    }
)


@dataclass(slots=True, eq=False)
class Batch:
    """Rows that are decoded together: b rows, S columns in the cache, as many as the longest row has of its own."""

    rows: list[Row]
    cache: DynamicCache
    mask_bS: Tensor  # 1 in a row's own columns
    length_b: Tensor  # how many these are
    shift_b: (
        Tensor  # what the position of the row's next token is more than that: images have fewer positions than tokens
    )
    next_b1: Tensor | None = None  # the token that goes into the next forward pass
    _knobs: Knobs | None = None

    def sample(self, logits_bV: Tensor, version: int) -> None:
        """Sample one more token for each row; its log-prob is that of the distribution it was drawn from."""
        if self._knobs is None:
            params = [row.request.sampling for row in self.rows]
            self._knobs = Knobs.of(params, logits_bV.shape[1], logits_bV.device)
        token_b, log_prob_b = draw_tokens(self.rows, self._knobs, logits_bV.float())
        self.next_b1 = token_b[:, None]
        for row, token, log_prob in zip(self.rows, token_b.tolist(), log_prob_b.tolist(), strict=True):
            row.take(token, log_prob, version)

    def widen(self) -> Tensor:
        """Add a column to the mask, and return the positions [b, 1] of the tokens that go into the cache now."""
        positions_b1 = (self.length_b + self.shift_b)[:, None]
        self.mask_bS = torch.nn.functional.pad(self.mask_bS, (0, 1), value=1)
        self.length_b = self.length_b + 1
        return positions_b1

    def can_join(self) -> bool:
        """True where the cache can be joined with those of other batches of the model."""
        return _joinable(self.cache)

    def join(self, others: Sequence[Batch]) -> None:
        """Take up other batches' rows, behind one's own; before the next token of all is sampled."""
        batches = [self, *others]
        for layers in zip(*(batch.cache.layers for batch in batches), strict=True):
            _join(layers)
        width = max(batch.mask_bS.shape[1] for batch in batches)
        self.mask_bS = torch.cat([_padded(batch.mask_bS, width, -1) for batch in batches])
        self.length_b = torch.cat([batch.length_b for batch in batches])
        self.shift_b = torch.cat([batch.shift_b for batch in batches])
        self.rows = [row for batch in batches for row in batch.rows]
        self.next_b1 = self._knobs = None

    def spread(self, rows: list[Row], number_b: Tensor) -> None:
        """Give each of these rows what was computed for the one of that number."""
        self.rows = rows
        self.mask_bS, self.length_b, self.shift_b = (
            column[number_b] for column in (self.mask_bS, self.length_b, self.shift_b)
        )
        self.cache.reorder_cache(number_b)  # also of states, which batch_select_indices leaves out

    def keep(self, index: list[int]) -> None:
        """Drop all other rows, and the columns that were only theirs; the last rows take the places of the first."""
        count = len(index)
        holes = sorted(set(range(count)) - set(index))
        order, movers = list(range(count)), [i for i in index if i >= count]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self.rows, self._knobs = [self.rows[i] for i in order], None
        if not order:
            return
        chosen_b, holes_m, movers_m = (torch.tensor(i, device=self.mask_bS.device) for i in (order, holes, movers))
        self.mask_bS, self.length_b = self.mask_bS[chosen_b], self.length_b[chosen_b]
        self.shift_b = self.shift_b[chosen_b]
        if self.next_b1 is not None:
            self.next_b1 = self.next_b1[chosen_b]
        width = int(self.length_b.max())
        if width < self.mask_bS.shape[1] and _joinable(self.cache):
            self.mask_bS = self.mask_bS[:, -width:]
            for layer in self.cache.layers:
                _cut(layer, width)
        for layer in self.cache.layers:
            if isinstance(layer, GrowingLayer):
                layer.keep(count, holes_m, movers_m)
            else:
                layer.reorder_cache(chosen_b)


def _joinable(cache: DynamicCache) -> bool:
    return all(type(layer).__name__ in JOINABLE for layer in cache.layers)


def _padded(columns: Tensor, width: int, dim: int) -> Tensor:
    """Pad dimension -1 or -2 with zeros on the left, up to this width."""
    missing = width - columns.shape[dim]
    return torch.nn.functional.pad(columns, (0, 0) * (-1 - dim) + (missing, 0)) if missing else columns


def _join(layers: Sequence[Any]) -> None:
    """Add the rows of the others to the first of these layers."""
    mine = layers[0]
    if isinstance(mine, GrowingLayer):
        mine.join(list(layers[1:]))
    elif isinstance(mine, DynamicLayer) and mine.keys is not None:
        width = max(layer.keys.shape[-2] for layer in layers)
        mine.keys = torch.cat([_padded(layer.keys, width, -2) for layer in layers])
        mine.values = torch.cat([_padded(layer.values, width, -2) for layer in layers])
    if isinstance(mine, DynamicSlidingWindowLayer):
        mine.cumulative_length = max(layer.cumulative_length for layer in layers)
    if isinstance(mine, LinearAttentionLayer):
        for name in ("conv_states", "recurrent_states"):
            own: dict[int, Any] = getattr(mine, name)
            for i, state in own.items():
                if state is not None:
                    own[i] = torch.cat([getattr(layer, name)[i] for layer in layers])


def _cut(layer: Any, width: int) -> None:
    """Leave the last columns of a layer; one with a window may have fewer already."""
    if isinstance(layer, GrowingLayer):
        layer.cut(width)
    elif isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        layer.keys, layer.values = layer.keys[..., -width:, :], layer.values[..., -width:, :]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = width
