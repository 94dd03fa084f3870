"""Rows that the hf engine decodes together, with the cache of what was computed for them: they join and leave it.

A row's own columns of a cache end with the last one, because every step adds to each row. So two caches join when the
narrower one is padded on the left, and once the widest row has left, columns are cut off there. Drafts that were not
kept leave holes between a row's columns, which the mask hides until the columns are moved together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase
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
    """Rows that are decoded together: b rows, S columns in the cache, as many as the widest row spans."""

    rows: list[Row]
    cache: DynamicCache
    mask_bS: Tensor  # 1 in a row's own columns
    length_b: Tensor  # how many these are
    shift_b: (
        Tensor  # what the position of the row's next token is more than that: images have fewer positions than tokens
    )
    next_b1: Tensor | None = None  # the token that goes into the next forward pass
    holes_b: Tensor = field(init=False)  # columns of drafts that were not kept, between a row's own
    _knobs: Knobs | None = None

    def __post_init__(self) -> None:
        self.holes_b = torch.zeros_like(self.length_b)

    def sample(self, logits_bV: Tensor, version: int) -> None:
        """Sample one more token for each row; its log-prob is that of the distribution it was drawn from."""
        token_b, log_prob_b = draw_tokens(self.rows, self._knobs_for(logits_bV), logits_bV.float())
        self.next_b1 = token_b[:, None]
        for row, token, log_prob in zip(self.rows, token_b.tolist(), log_prob_b.tolist(), strict=True):
            row.take(token, log_prob, version)

    def sample_ahead(
        self,
        logits_bwV: Tensor,
        drafts: Sequence[Sequence[int]],
        version: int,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> list[int]:
        """Sample each row's next tokens, as far as its drafts are what is drawn; returns how many each row took.

        logits_bwV: behind the token that was sampled last and behind each draft; rows with fewer drafts leave the rest
        unread. Token i of a row is drawn with its number i, as `sample` does: drafts decide how many tokens a step
        yields, never which.
        """
        ahead = [i for draft in drafts for i in range(len(draft) + 1)]
        row_N = [b for b, draft in enumerate(drafts) for _ in range(len(draft) + 1)]
        at_N = torch.tensor(row_N, device=logits_bwV.device)
        logits_NV = logits_bwV[at_N, torch.tensor(ahead, device=at_N.device)].float()
        knobs = self._knobs_for(logits_NV).repeated(at_N, row_N)
        token_N, log_prob_N = draw_tokens([self.rows[b] for b in row_N], knobs, logits_NV, ahead)
        drawn = iter(zip(token_N.tolist(), log_prob_N.tolist(), strict=True))
        taken = list[int]()
        for row, draft in zip(self.rows, drafts, strict=True):
            mine, before = [next(drawn) for _ in range(len(draft) + 1)], len(row.token_ids)
            for (token, log_prob), guess in itertools.zip_longest(mine, draft):
                row.take(token, log_prob, version)
                if token != guess or row.end(tokenizer) is not None:
                    break
            taken.append(len(row.token_ids) - before)
            row.drafted, row.kept = row.drafted + len(draft), row.kept + taken[-1] - 1
        self.next_b1 = torch.tensor([row.token_ids[-1:] for row in self.rows], device=at_N.device)
        return taken

    def _knobs_for(self, logits: Tensor) -> Knobs:
        if self._knobs is None:
            params = [row.request.sampling for row in self.rows]
            self._knobs = Knobs.of(params, logits.shape[-1], logits.device)
        return self._knobs

    def widen(self, columns: int = 1) -> Tensor:
        """Add columns to the mask, and return the positions [b, columns] of the tokens that go into the cache now."""
        begin_b1 = (self.length_b + self.shift_b)[:, None]
        self.mask_bS = torch.nn.functional.pad(self.mask_bS, (0, columns), value=1)
        self.length_b = self.length_b + columns
        return begin_b1 + torch.arange(columns, device=begin_b1.device)

    def settle(self, taken: Sequence[int], columns: int) -> None:
        """Forget, of the columns that came last, those behind the first `taken` of each row."""
        taken_b, most = torch.tensor(taken, device=self.mask_bS.device), max(taken)
        self.mask_bS = self.mask_bS[:, : self.mask_bS.shape[1] - (columns - most)]
        self.mask_bS[:, -most:] = (torch.arange(most, device=taken_b.device) < taken_b[:, None]).to(self.mask_bS.dtype)
        self.length_b, self.holes_b = self.length_b + taken_b - columns, self.holes_b + most - taken_b
        for layer in self.cache.layers:
            layer.crop(most - columns)

    def close_up(self) -> None:
        """Move each row's own columns together where the holes between them take as much room as the longest row."""
        width = int(self.length_b.max())
        if self.mask_bS.shape[1] > 2 * width:
            own_bS = self.mask_bS.argsort(dim=1, stable=True)[:, -width:]
            self.mask_bS, self.holes_b = self.mask_bS.gather(1, own_bS), torch.zeros_like(self.holes_b)
            for layer in self.cache.layers:
                layer.pick(own_bS)

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
        self.holes_b = torch.cat([batch.holes_b for batch in batches])
        self.rows = [row for batch in batches for row in batch.rows]
        self.next_b1 = self._knobs = None

    def spread(self, rows: list[Row], number_b: Tensor) -> None:
        """Give each of these rows what was computed for the one of that number."""
        self.rows = rows
        self.mask_bS, self.length_b, self.shift_b, self.holes_b = (
            column[number_b] for column in (self.mask_bS, self.length_b, self.shift_b, self.holes_b)
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
        self.shift_b, self.holes_b = self.shift_b[chosen_b], self.holes_b[chosen_b]
        if self.next_b1 is not None:
            self.next_b1 = self.next_b1[chosen_b]
        width = int((self.length_b + self.holes_b).max())
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
