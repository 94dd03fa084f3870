"""Keys and values of the hf engine's rows, written in place; and attention of single tokens to them.

transformers' own layers copy every key for each token that is added, and repeat each for all heads that share it; both
cost more than the rest of a step on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION_NAME = "verl_like_decode"
_ROOM = 64  # columns, at least, that are allocated ahead
_FEW = 16  # tokens of a row that are computed beside its cache, and not as a prompt


class GrowingLayer(DynamicLayer):
    """Keys and values [b, heads, S, head size] of one layer, as views into memory with room for more columns and rows.

    What lies in the room is finite: a row's masked columns are multiplied by zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memory: list[Tensor] = []  # of keys, of values: [rows, heads, columns, head size]
        self._first = self._last = self._rows = 0  # columns and rows in use

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add columns [b, heads, s, head size] of all rows; returns all keys and all values."""
        added = key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._rows, columns = key_states.shape[0], added + max(_ROOM, added // 2)
            self._memory = [new.new_zeros(*new.shape[:2], columns, new.shape[3]) for new in (key_states, value_states)]
        self._reserve(self._rows, 0, added)
        for memory, new in zip(self._memory, (key_states, value_states), strict=True):
            memory[: self._rows, :, self._last : self._last + added] = new
        self._last += added
        return self._show()

    def join(self, others: list[GrowingLayer]) -> None:
        """Take up the rows of other layers behind one's own; the last columns of all stand together."""
        rows = self._rows + sum(other._rows for other in others)
        width = self._last - self._first
        before = max([0, *(other._last - other._first - width for other in others)])
        self._reserve(rows, before, 0)
        self._first -= before
        for other in others:
            behind = self._rows + other._rows
            for memory, taken in zip(self._memory, (other.keys, other.values), strict=True):
                assert taken is not None
                memory[self._rows : behind, :, self._last - taken.shape[2] : self._last] = taken
            self._rows = behind
        self._show()

    def cut(self, width: int) -> None:
        """Leave the last columns."""
        self._first = self._last - width
        self._show()

    def pick(self, columns_bw: Tensor) -> None:
        """Leave these columns of each row, in this order."""
        width = columns_bw.shape[1]
        for memory in self._memory:
            used = memory[: self._rows, :, self._first : self._last]
            at = columns_bw[:, None, :, None].expand(-1, used.shape[1], -1, used.shape[3])
            used[:, :, :width] = used.gather(2, at)
        self._last = self._first + width
        self._show()

    def keep(self, count: int, holes: Tensor, movers: Tensor) -> None:
        """Leave the first rows, after those at `movers` have taken the places `holes` among them."""
        if len(holes):
            for memory in self._memory:
                used = memory[:, :, self._first : self._last]
                used[holes] = used[movers]
        self._rows = count
        self._show()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows by number, some maybe several times."""
        if self.is_initialized:
            self._memory = [memory[beam_idx] for memory in self._memory]
            self._rows = len(beam_idx)
            self._show()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove columns."""
        self._last -= abs(tokens_to_remove)
        self._show()

    def _reserve(self, rows: int, before: int, behind: int) -> None:
        """Make sure that there are so many rows, and columns before and behind those in use."""
        had_rows, heads, columns, _ = self._memory[0].shape
        if rows <= had_rows and before <= self._first and self._last + behind <= columns:
            return
        width = self._last - self._first
        shape = (
            rows if rows <= had_rows else max(rows, had_rows + had_rows // 4),
            heads,
            before + width + behind + max(_ROOM, width // 2),
        )
        for i, memory in enumerate(self._memory):
            larger = memory.new_zeros(*shape, memory.shape[3])
            larger[: self._rows, :, before : before + width] = memory[: self._rows, :, self._first : self._last]
            self._memory[i] = larger
        self._first, self._last = before, before + width

    def _show(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (memory[: self._rows, :, self._first : self._last] for memory in self._memory)
        return self.keys, self.values


def new_cache(config: PretrainedConfig, *, whole: bool = False) -> DynamicCache:
    """Make an empty cache for a model, whose layers of plain attention are written in place.

    whole: layers with a window keep what it hides, too.
    """
    cache = DynamicCache(config=config)
    plain = (DynamicLayer, DynamicSlidingWindowLayer) if whole else (DynamicLayer,)
    cache.layers = [GrowingLayer() if type(layer) in plain else layer for layer in cache.layers]
    return cache


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute what transformers' "sdpa" does, [b, s, heads, head size].

    A few tokens of each row that attend to its cache: query heads that share a key head become as many queries of it,
    so that nothing is repeated.
    """
    rows, heads, new, size = query.shape
    shared = heads // key.shape[1]
    few = new <= _FEW and options.get("position_bias") is None and options.get("cache") is None
    few = few and (new == 1 or attention_mask is not None)  # without a mask torch's own is the causal one
    if not few or shared == 1 or (attention_mask is not None and attention_mask.shape[1] != 1):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    folded = query.reshape(rows, key.shape[1], shared * new, size)
    if new > 1 and attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, shared, 1)
    attended = torch.nn.functional.scaled_dot_product_attention(
        folded,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )
    return attended.reshape(rows, heads, new, value.shape[3]).transpose(1, 2), None


def register() -> None:
    """Make `attend` known to transformers as ATTENTION_NAME, with masks as "sdpa" has them."""
    AttentionInterface.register(ATTENTION_NAME, attend)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
