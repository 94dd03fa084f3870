"""Queries with an axis of heads (latent attention, LFM2) in vLLM's CPU build: its rotary layer, no engine, beside
transformers' function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

TOKENS, HEADS, PLAIN, ROTATED = 7, 4, 16, 8


def test_every_head_is_rotated_by_its_own_position() -> None:
    """vLLM's CPU kernel would rotate others; where it no longer does, the work-around can go."""
    pytest.importorskip("vllm")
    from vllm import _custom_ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from verl_like.plugins.vllm.compat import rotate_all_heads

    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(ROTATED, ROTATED, 64, 10000.0, is_neox_style=False, dtype=torch.float32)
    query_THD, key_T1D = torch.randn(TOKENS, HEADS, PLAIN + ROTATED)[..., PLAIN:], torch.randn(TOKENS, 1, ROTATED)
    positions_T = torch.arange(3, 3 + TOKENS * HEADS)[:TOKENS]  # the kernel reads beyond them

    angles_TD = (positions_T[:, None] / 10000.0 ** (torch.arange(0, ROTATED, 2) / ROTATED)).repeat(1, 2)
    heads_first = (query_THD.transpose(0, 1)[None], key_T1D.transpose(0, 1)[None])
    query, key = apply_rotary_pos_emb_interleave(*heads_first, angles_TD.cos()[None], angles_TD.sin()[None])
    expected = torch.cat([query[0], key[0]]).transpose(0, 1)
    expected = torch.stack(expected.chunk(2, -1), -1).flatten(-2)  # transformers leaves pairs apart, vLLM beside

    def kernel(positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """In place, as vLLM calls it."""
        _custom_ops.rotary_embedding(positions, query, key, ROTATED, rotary.cos_sin_cache, False)
        return query, key

    def gap(rotate: Callable[..., tuple[Tensor, Tensor]], *, flat: bool = False) -> float:
        keys = torch.cat([key_T1D, torch.zeros(TOKENS * (HEADS - 1), 1, ROTATED)])[:TOKENS]  # it writes there as well
        queries = query_THD.contiguous().clone()
        got = rotate(positions_T, queries.flatten(1), keys.flatten(1)) if flat else rotate(positions_T, queries, keys)
        return float((torch.cat([each.view(TOKENS, -1, ROTATED) for each in got], 1) - expected).abs().max())

    rotate_all_heads()
    assert gap(kernel) > 0.1 and gap(kernel, flat=True) < 1e-5
    assert gap(rotary.forward_cpu) < 1e-5 and gap(rotary.forward_cpu, flat=True) < 1e-5
