"""SGLang's attention on a CPU in blocks of sequences gives what its own loop over them gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_like.plugins.sglang import attention, compat

pytestmark = [pytest.mark.engines, pytest.mark.sglang]
ROOT = Path(__file__).parents[2]
CACHE, LONGEST = 6000, 400


def test_blocks_of_sequences_attend_as_one_by_one() -> None:
    """In a process of its own: importing SGLang changes transformers."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "compared: 24 of steps in blocks, 2 of steps that are not"


def compare() -> None:
    compat.prepare(torch.device("cpu"), quiet=True)
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # type: ignore[import-not-found]
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # type: ignore[import-not-found]

    torch.manual_seed(1)
    kinds, in_blocks, apart = [TorchNativeAttnBackend, ATTENTION_BACKENDS["torch_native"]], 0, 0
    steps = [
        ([1] * 40, [7 * i % LONGEST + 1 for i in range(40)]),
        ([1], [3]),
        ([9, 30, 1, 1, 200], [9, 70, 33, 1, 390]),
    ]
    for new, whole in steps:
        for heads, keys, window in ((4, 4, -1), (6, 2, -1), (4, 1, 20), (4, 2, 0)):
            for dtype in (torch.float32, torch.bfloat16):
                one_by_one, blocks = (attended(kind, new, whole, heads, keys, window, dtype) for kind in kinds)
                bound = 1e-6 if dtype == torch.float32 else 2e-2
                assert float((one_by_one - blocks).abs().max()) < bound, (new, heads, window, dtype)
                in_blocks += 1
    attention._MOST_KEYS = 1500  # several blocks
    one_by_one, blocks = (attended(kind, *steps[0], 4, 2, -1, torch.float32) for kind in kinds)
    assert float((one_by_one - blocks).abs().max()) < 1e-6
    attention._MOST_PAIRS = 200 * 390 - 1
    for new, whole in (steps[2], ([200], [390])):
        one_by_one, blocks = (attended(kind, new, whole, 4, 2, -1, torch.float32) for kind in kinds)
        assert torch.equal(one_by_one, blocks)
        apart += 1
    print(f"compared: {in_blocks} of steps in blocks, {apart} of steps that are not")


def attended(
    kind: Any, new: list[int], whole: list[int], heads: int, keys: int, window: int, dtype: torch.dtype
) -> torch.Tensor:
    """What one layer makes of a step: `new` tokens at the end of sequences of `whole` tokens."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode  # type: ignore[import-not-found]

    draw, slots = torch.Generator().manual_seed(5), torch.full((len(new), LONGEST), CACHE - 1)
    free = torch.randperm(CACHE - 1, generator=draw)
    for row, length in enumerate(whole):
        slots[row, :length], free = free[:length], free[length:]
    shape = (CACHE, keys, 16)
    kept, values = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
    kept[-1] = values[-1] = torch.nan  # where nothing is kept
    query = torch.randn(sum(new), heads * 16, generator=draw).to(dtype)
    pool = SimpleNamespace(get_key_buffer=lambda _: kept, get_value_buffer=lambda _: values)
    runner = SimpleNamespace(device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=slots), token_to_kv_pool=pool)
    decodes = set(new) == {1}
    lengths, news = torch.tensor(whole), torch.tensor(new)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
        encoder_lens=None,
        out_cache_loc=None,
        seq_lens=lengths,
        req_pool_indices=torch.arange(len(new)),
        extend_prefix_lens=None if decodes else lengths - news,
        extend_seq_lens=None if decodes else news,
    )
    layer = SimpleNamespace(
        qk_head_dim=16,
        v_head_dim=16,
        tp_q_head_num=heads,
        tp_k_head_num=keys,
        is_cross_attention=False,
        attn_type=None,
        layer_id=0,
        scaling=0.3,
        sliding_window_size=window,
    )
    backend = kind(runner)
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if decodes else backend.forward_extend
    return forward(query, None, None, layer, batch, save_kv_cache=False)


if __name__ == "__main__":
    compare()
