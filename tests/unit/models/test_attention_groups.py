"""Batched attention over groups of sequences, against one sequence at a time written out in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils.flop_counter import FlopCounterMode

from verl_like.models import attention, attention_groups
from verl_like.models.attention import packed_attention
from verl_like.models.attention_groups import groups_of
from verl_like.models.attention_sinks import attend_with_sinks
from verl_like.models.packing import Segments
from verl_like.models.prefix_tree import path_layout, paths

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 8
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0], dtype=torch.float64)


def tokens(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(count)
    shapes = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(1, h, count, DIM, generator=g, dtype=torch.float64).mul_(2.0).to(dtype) for h in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    outputs = []
    for qs, ks, vs in zip(*(t[0].split(lengths, dim=1) for t in (q, k, v)), strict=True):
        ks, vs = (t.repeat_interleave(HEADS // KV_HEADS, dim=0) for t in (ks, vs))
        scores = torch.einsum("hid,hjd->hij", qs, ks) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        n = qs.shape[1]
        seen = torch.tensor([[j <= i and (window is None or i - j < window) for j in range(n)] for i in range(n)])
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, n, 1)], -1)
        outputs.append(torch.einsum("hij,hjd->ihd", scores.softmax(-1)[..., :n], vs))
    return torch.cat(outputs)[None]


def tree_of(lengths: list[int], forks: list[tuple[int, int]]) -> tuple[Segments, list[int]]:
    """Rows of which each may go on from an earlier one, after some of its tokens; and the place of every row's tokens.

    forks: of each row, the number of that row and the number of tokens, as far as there are so many.
    """
    holders, shared = list[int](), list[int]()
    for s, (length, (row, count)) in enumerate(zip(lengths, forks, strict=False)):
        row %= s + 1
        count = 0 if row == s else min(count, lengths[row], length - 1)
        while count and count <= shared[row]:
            row = holders[row]
        holders.append(row if count else s)
        shared.append(count)
    path_S = paths(torch.tensor(lengths), torch.tensor(shared), holders)
    own = [n - count for n, count in zip(lengths, shared, strict=True)]
    layout = path_layout(path_S, shared) if any(shared) else None
    return Segments(lengths, CPU, own_lengths=own, layout=layout, holders=holders), torch.cat(path_S).tolist()


def at_home(whole: Tensor, segments: Segments) -> Tensor:
    return whole if segments.layout is None else whole[:, segments.layout.home_T]


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 60), st.integers(70, 160)), min_size=1, max_size=8),
    forks=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 160)), min_size=8, max_size=8),
    window=st.sampled_from([None, 1, 7, 100]),
    softcap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([None, 0.2]),
    with_sinks=st.booleans(),
)
def test_equals_one_at_a_time(
    lengths: list[int],
    forks: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    scale: float | None,
    with_sinks: bool,
) -> None:
    segments, path = tree_of(lengths, forks)
    q, k, v = tokens(sum(segments.own_lengths))
    sinks = SINKS.clone().requires_grad_() if with_sinks else None
    ours, _ = packed_attention(
        *(torch.nn.Identity(), q, k, v, None),
        segments=segments,
        scaling=scale,
        sliding_window=window,
        softcap=softcap,
        s_aux=sinks,
    )
    whole = (t[:, :, path] for t in (q, k, v))
    expected = naive(*whole, lengths, DIM**-0.5 if scale is None else scale, window, softcap, sinks=sinks)
    expected = at_home(expected, segments)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)  # soft-capped scores are float32
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = [t for t in (q, k, v, sinks) if t is not None]
    gradients = [torch.autograd.grad((out * weight).sum(), inputs) for out in (ours, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@dataclass
class StandIn:
    """A flash kernel for the CPU: of lse and the output its backward pass makes weights and mean, and no more."""

    lengths: list[int]
    window: int | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            scores = self._scores(q, k)
            return torch.einsum("hij,jhd->ihd", scores.softmax(-1), self._of_all(v)), scores.logsumexp(-1).t()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = (self._scores(q, k) - lse.t()[..., None]).exp()
        of_weights = torch.einsum("ihd,jhd->hij", grad, self._of_all(v)) - (grad * out).sum(-1).t()[..., None]
        slope = weights * of_weights * DIM**-0.5
        found = (torch.einsum("hij,ihd->jhd", part, of) for part, of in ((slope, q), (weights, grad)))
        fewer = (each.unflatten(1, (KV_HEADS, -1)).sum(2) for each in found)
        return torch.einsum("hij,jhd->ihd", slope, self._of_all(k)), *fewer  # type: ignore[return-value]

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        row = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
        place = torch.arange(len(row))
        behind = place[:, None] - place
        seen = (row[:, None] == row) & (behind >= 0) & (behind < (self.window or len(row)))
        return (torch.einsum("ihd,jhd->hij", q, self._of_all(k)) * DIM**-0.5).masked_fill(~seen, -torch.inf)

    def _of_all(self, t: Tensor) -> Tensor:
        return t.repeat_interleave(HEADS // KV_HEADS, 1)


@pytest.mark.parametrize("way", ["varlen", "long rows", "long rows, window"])
def test_sinks_around_a_kernel_keep_all_gradients(way: str) -> None:
    """Of a kernel whose lse has no gradient; rescaled outside of it, as is tempting, only the output is right."""
    window = 7 if way != "long rows" else None
    lengths = [40, 1, 49] if way == "varlen" else [600, 530]
    (q, k, v), sinks = tokens(sum(lengths)), SINKS.clone().requires_grad_()
    inputs, segments = [q, k, v, sinks], Segments(lengths, CPU)
    expected = naive(q, k, v, lengths, DIM**-0.5, window, None, sinks=sinks)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    if way == "varlen":
        kernel, (queries, keys, values) = StandIn(lengths, window), (t[0].transpose(0, 1) for t in (q, k, v))
        ours = attend_with_sinks(queries, keys, values, sinks, kernel)[None]
    else:
        ours, _ = packed_attention(
            *(torch.nn.Identity(), q, k, v, None), segments=segments, sliding_window=window, s_aux=sinks
        )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    for a, b in zip(torch.autograd.grad((ours * weight).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    if way == "varlen":
        lse = kernel.forward(queries, keys, values)[1].detach()
        without = naive(q, k, v, lengths, DIM**-0.5, window, None)
        tempting = without * torch.sigmoid(lse - sinks)[None, ..., None]
        torch.testing.assert_close(tempting, expected, rtol=0, atol=1e-12)
        found = torch.autograd.grad((tempting * weight).sum(), inputs)
        assert all(float((a - b).abs().max()) > 1e-2 for a, b in zip(found[:2], wanted[:2], strict=True))


def varlen_by_mask(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: int, **options: Any) -> Tensor:
    """What torch's varlen_attn says that it does, written out: a row's queries are the last ones of its keys."""
    outputs, left = [], options["window_size"][0]
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    for n in range(len(cu_q) - 1):
        ours, theirs = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        scores = torch.einsum("ihd,jhd->hij", q[ours], k[theirs]) * DIM**-0.5
        behind = (
            torch.arange(scores.shape[2]) - (scores.shape[2] - scores.shape[1]) - torch.arange(scores.shape[1])[:, None]
        )
        seen = (behind <= 0) & (behind >= (-left if left >= 0 else -len(k)))
        outputs.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v[theirs]))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 9])
def test_kernels_of_cuda_are_told_the_same_tree(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Bounds and copies that a varlen kernel gets, through a stand-in for it: output and gradients of the blocks."""
    monkeypatch.setattr(attention, "flash_attention_version", lambda: None)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_mask)
    segments, _ = tree_of([20, 31, 44, 44, 50, 12], [(0, 0), (0, 15), (1, 31), (1, 28), (2, 40), (0, 3)])
    q, k, v = tokens(sum(segments.own_lengths))
    how = attention_groups.Scoring(window=window)
    outputs = [attend(q, k, v, segments, how) for attend in (attention._varlen, attention_groups.grouped_attention)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outputs]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_long_rows_of_a_tree(window: int | None, with_sinks: bool) -> None:
    """By the kernel behind SDPA: a branch with few queries behind many keys, and one that has more of its own."""
    segments, path = tree_of([500, 800, 530, 790], [(0, 0), (0, 420), (1, 500), (0, 100)])
    assert segments.own_lengths == (500, 380, 30, 690)
    assert [shape for _, shape in groups_of(segments)[0].shapes] == [380, 790, 30, 500]
    q, k, v = tokens(sum(segments.own_lengths))
    sinks = SINKS.clone().requires_grad_() if with_sinks else None
    options: dict[str, Any] = {"segments": segments, "sliding_window": window, "s_aux": sinks}
    ours, _ = packed_attention(torch.nn.Identity(), q, k, v, None, **options)
    whole = (t[:, :, path] for t in (q, k, v))
    expected = at_home(naive(*whole, [*segments.lengths], DIM**-0.5, window, None, sinks=sinks), segments)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = [t for t in (q, k, v, sinks) if t is not None]
    gradients = [torch.autograd.grad((out * weight).sum(), inputs) for out in (ours, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_calls_hold_rows_that_begin_alike_and_leave_out_queries() -> None:
    """Four answers of about 200 tokens to a prompt of 300 are a call without its queries; short rows are one with."""
    segments, _ = tree_of(
        [480, 500, 500, 501, 40, 44, 45], [(0, 0), (0, 300), (0, 300), (0, 300), (4, 0), (4, 9), (4, 9)]
    )
    queries, keys = groups_of(segments)
    assert keys.shapes == ((3, 501), (1, 480), (3, 45)) and queries.shapes == ((3, 201), (1, 480), (3, 45))


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
    shapes = groups_of(Segments([900, 20, 31, 44, 12, 901, 950], CPU))[0].shapes
    assert shapes == ((1, 950), (2, 901), (4, 44))


def test_equal_lengths_move_nothing() -> None:
    groups, _ = groups_of(Segments([12, 12, 12], CPU))
    assert groups.shapes == ((3, 12),) and groups.layout is None


def test_dropout_with_a_soft_cap_or_sinks_is_refused() -> None:
    q, k, v = tokens(4)
    for softcap, sinks in ((2.0, None), (None, SINKS)):
        with pytest.raises(ValueError, match="attention dropout"):
            packed_attention(
                *(torch.nn.Identity(), q, k, v, None),
                segments=Segments([4], CPU),
                dropout=0.1,
                softcap=softcap,
                s_aux=sinks,
            )
