"""A model with Liger's kernels against the plain one, on a GPU in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.engine import tiny
from verl_like.config.model import ModelConfig
from verl_like.models import loading, packing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("liger_kernel")


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3"])
def test_values_and_gradients(tmp_path: Path, architecture: str) -> None:
    path, rows, device = tiny.model_folder(tmp_path, architecture), tiny.experience(16), torch.device("cuda")
    results = []
    for use_liger in (False, True):
        config = ModelConfig(path=path, use_liger=use_liger)
        hf_config = loading.load_hf_config(config)
        loading.check_backend(config, hf_config, device)
        model = loading.build_token_model(
            config, hf_config, kind="policy", dtype=torch.float32, vocab_size=tiny.VOCAB, seed=5
        )
        loading.replace_functions(model.hf, config, device, compiled=False)
        model.to(device, torch.bfloat16)
        x = packing.pack(rows, packing.response_positions(rows, sampled_only=True), device)
        log_probs = model(x, frozenset({"log_probs"}), 1.0)["log_probs"]
        log_probs.sum().backward()
        gradient = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
        results.append((log_probs.detach().float(), gradient))
    (plain, plain_gradient), (ours, gradient) = results
    assert float((ours - plain).abs().mean()) < 0.1
    assert float((gradient - plain_gradient).norm() / plain_gradient.norm()) < 0.1
