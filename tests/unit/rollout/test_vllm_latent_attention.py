"""Queries of latent attention in vLLM's CPU build: its rotary layer, no engine, beside transformers' function."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

HEADS, PLAIN, ROTATED = 4, 16, 8


def test_every_head_is_rotated_by_its_own_position() -> None:
    """vLLM's CPU kernel would rotate others; where it no longer does, the work-around can go."""
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from verl_like.plugins.vllm.engine import rotate_all_heads

    attention = nn.Module()
    attention.qk_rope_head_dim = ROTATED
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(ROTATED, ROTATED, 32, 10000.0, is_neox_style=False, dtype=torch.float32)
    rotary._forward_method = rotary.forward_cpu  # as without compilation
    attention.rotary_emb = rotary
    query_THD, key_T1D = torch.randn(7, HEADS, PLAIN + ROTATED)[..., PLAIN:], torch.randn(7, 1, ROTATED)
    positions_T = torch.arange(3, 10)

    angles_TD = (positions_T[:, None] / 10000.0 ** (torch.arange(0, ROTATED, 2) / ROTATED)).repeat(1, 2)
    heads_first = (query_THD.transpose(0, 1)[None], key_T1D.transpose(0, 1)[None])
    query, key = apply_rotary_pos_emb_interleave(*heads_first, angles_TD.cos()[None], angles_TD.sin()[None])
    expected = torch.cat([query[0], key[0]]).transpose(0, 1)
    expected = torch.stack(expected.chunk(2, -1), -1).flatten(-2)  # transformers leaves pairs apart, vLLM beside

    def gap() -> float:
        got = rotary(positions_T, query_THD.clone(), key_T1D.clone())
        return float((torch.cat(got, 1) - expected).abs().max())

    assert gap() > 0.1
    rotate_all_heads(attention)
    assert gap() < 1e-5
