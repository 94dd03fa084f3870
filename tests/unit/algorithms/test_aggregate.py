from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_like.algorithms.aggregate import AGGREGATIONS, aggregate
from verl_like.batch import Denominators

LOSS = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0], [99.0, 99.0, 99.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
COUNTS = Denominators(num_tokens=4, num_sequences=3, max_response_length=8)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 4),
        ("token-sum", 16.0),
        ("seq-mean-token-sum", (6 + 10) / 3),
        ("seq-mean-token-mean", (2 + 10) / 3),
        ("seq-mean-token-sum-norm", (6 + 10) / 3 / 8),
    ],
)
def test_hand_values(mode: str, expected: float) -> None:
    assert aggregate(LOSS, MASK, mode, COUNTS).item() == pytest.approx(expected)


def test_loss_scale_factor_is_for_sum_norm_only() -> None:
    for mode in AGGREGATIONS.names():
        scaled, plain = aggregate(LOSS, MASK, mode, COUNTS, 2.0), aggregate(LOSS, MASK, mode, COUNTS)
        assert scaled.item() == pytest.approx(plain.item() * (4 if mode == "seq-mean-token-sum-norm" else 1))


def test_a_misspelt_mode_is_told() -> None:
    with pytest.raises(ValueError, match="Did you mean 'token-mean'"):
        aggregate(LOSS, MASK, "token-meen", COUNTS)


@pytest.mark.parametrize("mode", AGGREGATIONS.names())
def test_nothing_to_learn_from_is_zero_not_nan(mode: str) -> None:
    nothing = Denominators(num_tokens=0, num_sequences=0, max_response_length=8)
    for rows in (0, 2):
        loss = torch.full((rows, 3), float("nan"), requires_grad=True)
        total = aggregate(loss, torch.zeros(rows, 3, dtype=torch.bool), mode, nothing)
        total.backward()
        assert total.item() == 0.0
        assert loss.grad is not None and (loss.grad == 0).all()


def naive(loss: Tensor, mask: Tensor, mode: str, counts: Denominators) -> float:
    rows = [[x for x, m in zip(r, k, strict=True) if m] for r, k in zip(loss.tolist(), mask.tolist(), strict=True)]
    tokens = [x for row in rows for x in row]
    sums = [sum(row) for row in rows]
    means = [sum(row) / len(row) if row else 0.0 for row in rows]
    return {
        "token-mean": sum(tokens) / counts.num_tokens,
        "token-sum": sum(tokens),
        "seq-mean-token-sum": sum(sums) / counts.num_sequences,
        "seq-mean-token-mean": sum(means) / counts.num_sequences,
        "seq-mean-token-sum-norm": sum(sums) / counts.num_sequences / counts.max_response_length,
    }[mode]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=9).filter(any),
    cut=st.integers(1, 9),
    padding=st.integers(0, 4),
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(AGGREGATIONS.names()),
)
def test_cut_order_and_padding_do_not_matter(lengths: list[int], cut: int, padding: int, seed: int, mode: str) -> None:
    """Value and gradient: whole batch at once = micro-batches of `cut` rows in another order with other padding."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), 6
    mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    loss = torch.randn(rows, width, generator=generator, dtype=torch.float64).requires_grad_()
    counts = Denominators(num_tokens=sum(lengths), num_sequences=rows, max_response_length=11)
    whole = aggregate(loss, mask, mode, counts)
    assert whole.item() == pytest.approx(naive(loss, mask, mode, counts))
    (gradient,) = torch.autograd.grad(whole, loss)

    total = torch.zeros((), dtype=torch.float64)
    for part in torch.randperm(rows, generator=generator).split(cut):
        part_loss = torch.nn.functional.pad(loss[part], (0, padding), value=float("nan"))
        part_mask = torch.nn.functional.pad(mask[part], (0, padding), value=False)
        total = total + aggregate(part_loss, part_mask, mode, counts)
    assert total.item() == pytest.approx(whole.item())
    (cut_gradient,) = torch.autograd.grad(total, loss)
    assert torch.allclose(cut_gradient, gradient)


def test_a_mean_of_micro_batch_means_would_be_noticed() -> None:
    """The classical fault, planted: local denominators give another number for an uneven cut."""
    faulty = 0.0
    for part in (slice(0, 1), slice(1, 3)):
        tokens, rows = int(MASK[part].sum()), len(MASK[part])
        local = Denominators(num_tokens=tokens, num_sequences=rows, max_response_length=8)
        faulty += aggregate(LOSS[part], MASK[part], "token-mean", local).item() / 2
    assert faulty != pytest.approx(aggregate(LOSS, MASK, "token-mean", COUNTS).item())
