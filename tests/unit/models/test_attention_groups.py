"""Batched attention over groups of sequences, against one sequence at a time written out in full."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_like.models.attention import packed_attention
from verl_like.models.attention_groups import groups_of
from verl_like.models.packing import Segments

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 8


def tokens(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(count)
    shapes = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(1, h, count, DIM, generator=g, dtype=torch.float64).mul_(2.0).to(dtype) for h in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def naive(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float, window: int | None, softcap: float | None
) -> Tensor:
    outputs = []
    for qs, ks, vs in zip(*(t[0].split(lengths, dim=1) for t in (q, k, v)), strict=True):
        ks, vs = (t.repeat_interleave(HEADS // KV_HEADS, dim=0) for t in (ks, vs))
        scores = torch.einsum("hid,hjd->hij", qs, ks) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        n = qs.shape[1]
        seen = torch.tensor([[j <= i and (window is None or i - j < window) for j in range(n)] for i in range(n)])
        outputs.append(torch.einsum("hij,hjd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), vs))
    return torch.cat(outputs)[None]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    window=st.sampled_from([None, 1, 7]),
    softcap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([None, 0.2]),
)
def test_equals_one_at_a_time(
    lengths: list[int], window: int | None, softcap: float | None, scale: float | None
) -> None:
    q, k, v = tokens(sum(lengths))
    ours, _ = packed_attention(
        *(torch.nn.Identity(), q, k, v, None),
        segments=Segments(lengths, CPU),
        scaling=scale,
        sliding_window=window,
        softcap=softcap,
    )
    expected = naive(q, k, v, lengths, DIM**-0.5 if scale is None else scale, window, softcap)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)  # soft-capped scores are float32
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = [torch.autograd.grad((out * weight).sum(), [q, k, v]) for out in (ours, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", [[40, 9, 33], [600, 5, 600]])
def test_bfloat16_stays_close(lengths: list[int]) -> None:
    """Short sequences by bfloat16 products, long ones in float32: both within bfloat16's own rounding."""
    half = tokens(sum(lengths), torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in half]
    results = []
    for qkv in (half, exact):
        out, _ = packed_attention(torch.nn.Identity(), *qkv, None, segments=Segments(lengths, CPU))
        assert out.dtype == qkv[0].dtype
        results.append([out, *torch.autograd.grad(out.double().square().sum(), qkv)])
    for a, b in zip(*results, strict=True):
        assert float((a.detach().double() - b.detach()).norm() / b.detach().norm()) < 0.02


def test_short_sequences_share_a_call_and_long_ones_are_not_padded() -> None:
    shapes = groups_of(Segments([900, 20, 31, 44, 12, 901, 950], CPU)).shapes
    assert shapes == ((1, 950), (2, 901), (4, 44))


def test_equal_lengths_move_nothing() -> None:
    groups = groups_of(Segments([12, 12, 12], CPU))
    assert groups.shapes == ((3, 12),) and groups.layout is None


def test_sinks_and_dropout_with_a_soft_cap_are_refused() -> None:
    q, k, v = tokens(4)
    segments = Segments([4], CPU)
    with pytest.raises(ValueError, match=r"sinks.*use_remove_padding=False"):
        packed_attention(torch.nn.Identity(), q, k, v, None, segments=segments, s_aux=torch.zeros(HEADS))
    with pytest.raises(ValueError, match="attention dropout"):
        packed_attention(torch.nn.Identity(), q, k, v, None, segments=segments, softcap=2.0, dropout=0.1)
