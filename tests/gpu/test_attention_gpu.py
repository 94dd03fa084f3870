"""Packed attention's kernels on a GPU (torch's varlen, or FlashAttention where installed) against batched float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from verl_like.models.attention import flash_attention_version, packed_attention
from verl_like.models.attention_groups import Scoring, grouped_attention
from verl_like.models.packing import Segments
from verl_like.models.prefix_tree import path_layout, paths

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS = [1, 700, 33, 2049, 256]


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("window", [None, 3, 200])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(12, 2, 128), (8, 8, 64), (4, 1, 256)])
def test_values_and_gradients(heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None) -> None:
    _compare(Segments(LENGTHS, torch.device("cuda")), heads, kv_heads, dim, window, softcap)


@pytest.mark.parametrize("window", [None, 40])
def test_rows_that_begin_alike(window: int | None) -> None:
    """Four rows of a prompt of 300 tokens, the third a branch of the second, and two of 70: fewer queries than keys,
    masks aligned at the end."""
    length_S, shared_S = torch.tensor([301, 330, 420, 900, 71, 200]), torch.tensor([0, 300, 325, 300, 0, 70])
    own_S = length_S - shared_S
    layout = path_layout(paths(length_S, shared_S, [0, 0, 1, 0, 4, 4]), shared_S.tolist())
    segments = Segments(length_S.tolist(), torch.device("cuda"), own_lengths=own_S.tolist(), layout=layout)
    _compare(segments, 8, 2, 64, window, None)


def _compare(
    segments: Segments, heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None
) -> None:
    """bfloat16 by the kernels against float32 by batched groups, on the same inputs: output and gradients."""
    g, results, total = torch.Generator("cuda").manual_seed(0), [], sum(segments.own_lengths)
    exact = [torch.randn(1, h, total, dim, generator=g, device="cuda") for h in (heads, kv_heads, kv_heads)]
    slopes = torch.randn(1, total, heads, dim, generator=g, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [t.bfloat16().to(dtype).requires_grad_() for t in exact]
        output = _attend(dtype, inputs, segments, window, softcap)
        results.append([output, *torch.autograd.grad((output.float() * slopes).sum(), inputs)])
    for name, ours, expected in zip(("output", "query", "key", "value"), *results, strict=True):
        gap = float((ours.float() - expected).norm() / expected.norm())
        assert gap < 0.02, f"{name}: {gap:.1e} (FlashAttention {flash_attention_version()}, torch {torch.__version__})"


def _attend(
    dtype: torch.dtype, qkv: list[Tensor], segments: Segments, window: int | None, softcap: float | None
) -> Tensor:
    if dtype == torch.bfloat16:
        options: dict[str, Any] = {"segments": segments, "sliding_window": window, "softcap": softcap}
        return packed_attention(torch.nn.Identity(), *(*qkv, None), **options)[0]
    return grouped_attention(*(*qkv, segments), Scoring(window=window, softcap=softcap))[None]
