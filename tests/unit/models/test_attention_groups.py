"""Batched attention over groups of sequences, against one sequence at a time written out in full."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from verl_like.models import attention_groups
from verl_like.models.attention import packed_attention
from verl_like.models.attention_groups import groups_of
from verl_like.models.packing import Segments
from verl_like.models.shared_prompts import shared_layout

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
    lengths=st.lists(st.one_of(st.integers(1, 60), st.integers(70, 160)), min_size=1, max_size=8),
    window=st.sampled_from([None, 1, 7, 100]),
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


def test_rows_that_share_a_prompt_read_it_head_by_head() -> None:
    """Three rows of a prompt of 60 tokens, packed once, and a row of its own, with two key-value heads."""
    prompt, length = torch.tensor([60, 60, 60, 4]), torch.tensor([66, 90, 131, 20])
    own = length - torch.tensor([0, 60, 60, 0])
    first, start = torch.tensor([0, 0, 0, 3]), own.cumsum(0) - own
    layout = shared_layout(length, prompt, first, start)
    lengths = length.tolist()
    q, k, v = tokens(int(own.sum()))
    segments = Segments(lengths, CPU, own_lengths=own.tolist(), layout=layout)
    ours, _ = packed_attention(torch.nn.Identity(), q, k, v, None, segments=segments)
    whole = [t[:, :, layout.gather_K] for t in (q, k, v)]
    expected = naive(*whole, lengths, DIM**-0.5, None, None)[:, layout.home_T]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = [torch.autograd.grad((out * weight).sum(), [q, k, v]) for out in (ours, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # copies are added up in float32 at least


@pytest.mark.parametrize(("window", "share"), [(None, 6 / 9), (20, (64 + 2 * 83) / 576)])
def test_blocks_leave_out_what_no_query_sees(window: int | None, share: float) -> None:
    """Share of the products over the whole square of 192 tokens: three blocks, with a window of 64 and 2 x 83 keys."""
    q, k, v = tokens(192, torch.float32)
    with FlopCounterMode(display=False) as counter:
        out, _ = packed_attention(
            torch.nn.Identity(), q, k, v, None, segments=Segments([192], CPU), sliding_window=window
        )
        out.sum().backward()
    square = 6 * 2 * HEADS * DIM * 192**2
    assert counter.get_total_flops() == pytest.approx(share * square)


def test_masks_of_long_soft_capped_rows_are_not_kept() -> None:
    """A short row leaves one for each of its two blocks, to be found by the next layer."""
    attention_groups._kept_hiding.cache_clear()
    for length in (96, 700, 96):
        q, k, v = tokens(length, torch.float32)
        packed_attention(torch.nn.Identity(), q, k, v, None, segments=Segments([length], CPU), softcap=2.0)
    kept = attention_groups._kept_hiding.cache_info()
    short_blocks_of_long = sum(end <= 512 for _, end, _ in attention_groups._blocks(700, None))
    assert (kept.currsize, kept.hits) == (2 + short_blocks_of_long, 2)


def test_dropout_is_left_to_sdpa() -> None:
    q, k, v = tokens(40, torch.float32)
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(
            packed_attention(torch.nn.Identity(), q, k, v, None, segments=Segments([40], CPU), dropout=0.5)[0]
        )
    plain, _ = packed_attention(torch.nn.Identity(), q, k, v, None, segments=Segments([40], CPU))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    assert float((outputs[0] - plain).detach().abs().max()) > 0.1


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
