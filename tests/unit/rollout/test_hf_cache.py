"""Caches written in place are transformers' own after any joins and leaves; so is attention of single tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MistralConfig
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from verl_like.rollout.hf_cache import GrowingLayer, attend, new_cache

HEADS, SIZE = 2, 3


class Rows:
    """What each row has in the cache, by its own; the layer has to hold it in its last columns."""

    def __init__(self, seed: int) -> None:
        self.dice, self.layer = random.Random(seed), GrowingLayer()
        self.own: list[tuple[Tensor, Tensor]] = []  # keys and values [heads, n, size] of each row

    def fresh(self, count: int, width: int) -> tuple[GrowingLayer, list[tuple[Tensor, Tensor]]]:
        """A layer of prompts of different lengths, padded on the left with what no row may see."""
        layer, (keys, values) = GrowingLayer(), torch.randn(2, count, HEADS, width, SIZE)
        layer.update(keys, values)
        lengths = [width, *(self.dice.randint(1, width) for _ in range(count - 1))]
        return layer, [(k[:, -n:], v[:, -n:]) for k, v, n in zip(keys, values, lengths, strict=True)]

    def join(self) -> None:
        parts = [self.fresh(self.dice.randint(1, 3), self.dice.randint(1, 9)) for _ in range(self.dice.randint(1, 2))]
        if not self.own:
            (self.layer, self.own), *parts = parts
        self.layer.join([layer for layer, _ in parts])
        self.own += [row for _, rows in parts for row in rows]

    def add(self) -> None:
        keys, values = torch.randn(2, len(self.own), HEADS, 1, SIZE)
        found = self.layer.update(keys, values)
        assert found[0] is self.layer.keys and found[1] is self.layer.values
        self.own = [
            (torch.cat([k, new_k], 1), torch.cat([v, new_v], 1))
            for (k, v), new_k, new_v in zip(self.own, keys, values, strict=True)
        ]

    def leave(self) -> None:
        count = self.dice.randint(1, len(self.own))
        staying = sorted(self.dice.sample(range(len(self.own)), count))
        holes, movers = sorted(set(range(count)) - set(staying)), [i for i in staying if i >= count]
        order = [movers[holes.index(i)] if i in holes else i for i in range(count)]
        self.own = [self.own[i] for i in order]
        self.layer.cut(max(k.shape[1] for k, _ in self.own))
        self.layer.keep(count, torch.tensor(holes, dtype=torch.int64), torch.tensor(movers, dtype=torch.int64))

    def spread(self) -> None:
        number = [i for i in range(len(self.own)) for _ in range(self.dice.randint(1, 2))]
        self.layer.reorder_cache(torch.tensor(number))
        self.own = [self.own[i] for i in number]

    def check(self) -> None:
        keys, values = self.layer.keys, self.layer.values
        assert keys is not None and values is not None
        assert self.layer.get_seq_length() == max(k.shape[1] for k, _ in self.own) and len(keys) == len(self.own)
        assert bool(keys.isfinite().all() and values.isfinite().all())
        for i, (k, v) in enumerate(self.own):
            assert torch.equal(keys[i, :, -k.shape[1] :], k) and torch.equal(values[i, :, -v.shape[1] :], v)


@pytest.mark.parametrize("seed", range(8))
def test_rows_keep_what_is_theirs(seed: int) -> None:
    torch.manual_seed(seed)
    rows = Rows(seed)
    rows.join()
    for _ in range(150):
        rows.dice.choice([rows.add, rows.add, rows.add, rows.join, rows.leave, rows.spread])()
        while len(rows.own) > 30:
            rows.leave()
        rows.check()


def test_tokens_are_added_in_place() -> None:
    """Memory is taken anew for every 64 columns, then for half as many as there are."""
    layer, one = GrowingLayer(), torch.randn(2, HEADS, 1, SIZE)
    places = set[int]()
    for _ in range(300):
        keys, _ = layer.update(one, one)
        places.add(keys.untyped_storage().data_ptr())
    assert len(places) <= 5 and layer.get_seq_length() == 300


def test_cropped_columns_are_written_over() -> None:
    ours, theirs = GrowingLayer(), DynamicLayer()
    for width, gone in ((5, 2), (1, 1), (3, 0)):
        new = torch.randn(2, 2, HEADS, width, SIZE)
        for layer in (ours, theirs):
            layer.update(new[0], new[1])
            layer.crop(-gone)
    assert ours.keys is not None and theirs.keys is not None and ours.values is not None and theirs.values is not None
    assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


class Attention(nn.Module):
    is_causal = True

    def __init__(self, shared: int) -> None:
        super().__init__()
        self.num_key_value_groups = shared


@pytest.mark.parametrize(
    ("heads", "key_heads", "value_size", "tokens"), [(6, 2, 8, 1), (6, 2, 5, 1), (4, 4, 8, 1), (6, 2, 8, 3)]
)
@pytest.mark.parametrize("masked", ["not", "rows", "heads"])
def test_attention_is_that_of_transformers(
    heads: int, key_heads: int, value_size: int, tokens: int, masked: str
) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(3, heads, tokens, 8), torch.randn(3, key_heads, 7, 8)
    value, mask = torch.randn(3, key_heads, 7, value_size), None
    if masked != "not":
        mask = torch.rand(3, heads if masked == "heads" else 1, tokens, 7) > 0.4
        mask[..., -1] = True
    given: dict[str, Any] = {"scaling": 0.3, "dropout": 0.0}
    module = Attention(heads // key_heads)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, **given)
    found, weights = attend(module, query, key, value, mask, **given)
    assert weights is None and found.shape == (3, tokens, heads, value_size)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_window_hides_is_kept_where_it_is_asked_for(whole: bool) -> None:
    """trainer.parity=exact counts blocks of keys from the beginning of the sequence."""
    cache = new_cache(MistralConfig(num_hidden_layers=1, sliding_window=4), whole=whole)
    for keys, values in torch.randn(9, 2, 1, HEADS, 1, SIZE):
        cache.update(keys, values, 0)
    assert cache.layers[0].keys.shape[2] == (9 if whole else 3)
