"""Padded rows and flat ones: there and back, in every type that travels, and by pickle."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.ragged import Side, flat_rows, padded_rows, plain, revived

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
    padded = padded_rows(flat, lengths, width, side, 0)
    place = torch.arange(width)
    real = torch.stack([place < n if side == "right" else place >= width - n for n in lengths])
    assert padded.dtype == dtype and padded.shape == (len(lengths), width)
    assert torch.equal(padded[real], flat) and not padded[~real].any()  # the boolean index is the definition
    assert torch.equal(flat_rows(padded, lengths, side), flat)


def test_padding_has_the_fill() -> None:
    assert padded_rows(torch.tensor([5, 6, 7]), [1, 2], 3, "right", -1).tolist() == [[5, -1, -1], [6, 7, -1]]
    assert padded_rows(torch.tensor([5, 6, 7]), [1, 2], 3, "left", -1).tolist() == [[-1, -1, 5], [-1, 6, 7]]


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_travel_as_plain_arrays(dtype: torch.dtype) -> None:
    sent = torch.tensor([[0, 1], [1, 1]]).to(dtype)
    data = pickle.dumps(plain(sent[:, :1]))
    got = revived(pickle.loads(data))
    assert got.dtype == dtype and torch.equal(got, sent[:, :1]) and b"torch" not in data
    assert revived("text") == "text"
    got.zero_()  # its memory is its own, and may be written
