"""Padded rows and flat ones: there and back, in every type that travels, and by pickle."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like import flat_columns
from verl_like.flat_columns import (
    Blocks,
    Side,
    flat_blocks,
    flat_rows,
    last_true,
    on_rows,
    padded_rows,
    plain,
    revived,
    row_sums,
    take_rows,
)

TYPES = (torch.float32, torch.int32, torch.int64, torch.bool, torch.bfloat16, torch.float64)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=9),
    side=st.sampled_from(("left", "right")),
    more=st.integers(0, 3),
    dtype=st.sampled_from(TYPES),
)
def test_there_and_back(lengths: list[int], side: Side, more: int, dtype: torch.dtype) -> None:
    width = max(lengths) + more
    flat = (torch.arange(sum(lengths)) % 5 + 1).to(dtype)
    length_B = torch.tensor(lengths)
    padded = padded_rows(flat, length_B, width, side, 0)
    place = torch.arange(width)
    real = torch.stack([place < n if side == "right" else place >= width - n for n in lengths])
    assert padded.dtype == dtype and padded.shape == (len(lengths), width)
    assert torch.equal(padded[real], flat) and not padded[~real].any()  # the boolean index is the definition
    assert torch.equal(flat_rows(padded, length_B, side), flat)


def test_padding_has_the_fill() -> None:
    assert padded_rows(torch.tensor([5, 6, 7]), torch.tensor([1, 2]), 3, "right", -1).tolist() == [
        [5, -1, -1],
        [6, 7, -1],
    ]
    assert padded_rows(torch.tensor([5, 6, 7]), torch.tensor([1, 2]), 3, "left", -1).tolist() == [
        [-1, -1, 5],
        [-1, 6, 7],
    ]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_gradient_goes_through_the_padding(side: Side) -> None:
    """The way of devices and gradients, by an index, is the way of row copies."""
    values, length_B = torch.arange(6.0, requires_grad=True), torch.tensor([2, 0, 4])
    padded = padded_rows(values, length_B, 5, side, 9.0)
    assert torch.equal(padded.detach(), padded_rows(values.detach(), length_B, 5, side, 9.0))
    assert torch.equal(flat_rows(padded, length_B, side), values)
    (padded * torch.arange(15.0).view(3, 5)).sum().backward()
    expected = flat_rows(torch.arange(15.0).view(3, 5), length_B, side)
    assert values.grad is not None and torch.equal(values.grad, expected)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=9), data=st.data())
def test_rows_sums_and_ends(lengths: list[int], data: st.DataObject) -> None:
    """Against loops over the rows."""
    length_B, count = torch.tensor(lengths), sum(lengths)
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool)
    parts, marks = values.split(lengths), mask.split(lengths)
    index = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8))
    assert take_rows(values, length_B, index).tolist() == [x for row in index for x in parts[row].tolist()]
    assert torch.allclose(row_sums(values, length_B), torch.stack([part.double().sum() for part in parts]))
    assert row_sums(mask, length_B).tolist() == [int(part.sum()) for part in marks]
    assert row_sums(mask, length_B).dtype == torch.int64
    assert on_rows(length_B, length_B).tolist() == [n for n in lengths for _ in range(n)]
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    last = [max((s + i for i, x in enumerate(m) if x), default=-1) for s, m in zip(starts, marks, strict=True)]
    assert last_true(mask, length_B).tolist() == last


def test_sums_are_those_of_each_row_alone() -> None:
    """A tenth, and a tenth behind a million of tenths: equal rewards must have equal sums."""
    values, length_B = torch.full((1_000_002,), 0.1), torch.tensor([1, 1_000_000, 1])
    sums = row_sums(values, length_B)
    assert sums[0] == sums[2] == values[:1].double()[0]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    groups=st.integers(1, 4),
    entries=st.integers(1, 40),
)
def test_blocks_hold_each_row_once(lengths: list[int], groups: int, entries: int) -> None:
    """Whole groups, no larger than asked unless one group is; and what is put back stands where it was."""
    length_B, group_B = torch.tensor(lengths), torch.arange(len(lengths)) % groups
    values = torch.arange(1, sum(lengths) + 1)
    for given_B in (None, group_B):
        blocks, found = Blocks(length_B, given_B, entries), torch.zeros_like(values)
        seen = list(blocks)
        assert sorted(row for rows in seen for row in rows) == list(range(len(lengths)))
        for rows in seen:
            if given_B is not None:
                assert all((group_B[rows] == g).sum() in (0, (group_B == g).sum()) for g in range(groups))
            block = blocks.padded(values, rows)
            assert block.numel() <= entries or len(rows) == 1 or given_B is not None
            assert [row[:n] for row, n in zip(block.tolist(), length_B[rows].tolist(), strict=True)] == [
                take_rows(values, length_B, [row]).tolist() for row in rows
            ]
            blocks.put(found, rows, block)
        assert torch.equal(found, values)


def test_flat_blocks_are_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_columns, "_BLOCK", 5)
    found = list(flat_blocks(torch.tensor([3, 2, 1, 9, 0, 1])))
    assert [rows for rows, _ in found] == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 6)]
    assert [tokens for _, tokens in found] == [slice(0, 5), slice(5, 6), slice(6, 15), slice(15, 16)]
    assert list(flat_blocks(torch.zeros(0, dtype=torch.int64))) == []


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_travel_as_plain_arrays(dtype: torch.dtype) -> None:
    sent = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    data = pickle.dumps(plain(sent[:, :1]))
    got = revived(pickle.loads(data))
    assert got.dtype == dtype and torch.equal(got, sent[:, :1]) and b"torch" not in data
    assert revived("text") == "text"
    got.zero_()  # its memory is its own, and may be written
