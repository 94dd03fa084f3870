from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.algorithms.masked import masked_fill_zero, masked_mean, masked_sum, masked_var, masked_whiten

X = torch.tensor([[1.0, 2.0, 100.0], [4.0, 100.0, 100.0]])
M = torch.tensor([[True, True, False], [True, False, False]])


def test_hand_values() -> None:
    assert masked_sum(X, M).item() == 7.0
    assert masked_sum(X, M, dim=1).tolist() == [3.0, 4.0]
    assert masked_mean(X, M).item() == pytest.approx(7 / 3)
    assert masked_mean(X, M, dim=1).tolist() == [1.5, 4.0]
    assert masked_var(X, M).item() == pytest.approx(7 / 3)  # mean 7/3; (16 + 1 + 25) / 9 / (3 - 1)
    expected = [(1 - 7 / 3) / math.sqrt(7 / 3), (2 - 7 / 3) / math.sqrt(7 / 3), (4 - 7 / 3) / math.sqrt(7 / 3)]
    assert masked_whiten(X, M)[M].tolist() == pytest.approx(expected)
    assert (masked_whiten(X, M)[~M] == 0).all()


def test_nothing_true_gives_zero() -> None:
    nothing = torch.zeros_like(M)
    for value in (masked_sum(X, nothing), masked_mean(X, nothing), masked_var(X, nothing)):
        assert value.item() == 0.0
    assert masked_mean(X, nothing, dim=1).tolist() == [0.0, 0.0]
    assert (masked_whiten(X, nothing) == 0).all()
    assert masked_sum(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool)).item() == 0.0


def test_one_true_entry_whitens_to_zero() -> None:
    one = torch.zeros_like(M)
    one[1, 0] = True
    assert masked_var(X, one).item() == 0.0
    assert (masked_whiten(X, one) == 0).all()


def test_equal_values_whiten_to_zero() -> None:
    """In float32 the mean of many 0.1 is off by an ulp, which 1 / sqrt(1e-8) would blow up to 1e-4."""
    values = torch.full((100, 37), 0.1)
    assert masked_whiten(values, torch.ones_like(values, dtype=torch.bool)).abs().max() < 1e-9


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_the_mask_hides_does_not_matter(poison: float) -> None:
    poisoned = torch.where(M, X, poison)
    assert masked_fill_zero(poisoned, M).tolist() == [[1.0, 2.0, 0.0], [4.0, 0.0, 0.0]]
    for function in (masked_sum, masked_mean, masked_var, masked_whiten):
        assert torch.equal(function(poisoned, M), function(X, M))


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-50, 50), min_size=1, max_size=6), min_size=1, max_size=6),
    extra=st.integers(0, 5),
)
def test_padding_amount_does_not_matter(rows: list[list[float]], extra: int) -> None:
    def padded(width: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.zeros(len(rows), width, dtype=torch.float64)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            values[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
            mask[i, : len(row)] = True
        return values, mask

    width = max(map(len, rows))
    values, mask = padded(width)
    wide_values, wide_mask = padded(width + extra)
    for function in (masked_sum, masked_mean, masked_var):
        assert function(wide_values, wide_mask).item() == pytest.approx(function(values, mask).item(), abs=1e-9)
    whitened = masked_whiten(wide_values, wide_mask)
    assert torch.allclose(whitened[:, :width], masked_whiten(values, mask))
