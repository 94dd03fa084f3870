"""Liger's kernels in Triton's interpreter against transformers' modules, in a process of its own; and the refusals."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, Qwen2Config

from tests.unit.models.interpreter import run_interpreted, take_float_arguments
from verl_like.config.model import ModelConfig
from verl_like.models import lean_model, loading

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
has_liger = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")), reason="needs liger-kernel"
)


def teach_the_interpreter() -> None:
    """What compiled kernels have and the interpreter lacks: float arguments, and two functions of libdevice."""
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm

    take_float_arguments()
    rms_norm.rsqrt = lambda x: tl.rsqrt(x)  # looked up when it runs: the interpreter exchanges tl's functions
    geglu.tanh = lambda x: 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


def compare(folder: str) -> None:
    """A family whose norm has a plain weight, SiLU and norms of heads; one with one plus the weight and GELU."""
    from tests.unit.engine import tiny
    from tests.unit.models.test_packed_forward import assert_close, gradient_of, run
    from verl_like.models.lean_model import Replaced, put_in

    teach_the_interpreter()
    rows = tiny.experience(2, max_response=5)
    for architecture, norms in (("qwen3", 9), ("gemma2", 9)):
        path, results = tiny.model_folder(Path(folder), architecture), []
        for with_liger in (True, False):
            config = ModelConfig(path=path)
            model = loading.build_token_model(
                config,
                loading.load_hf_config(config),
                kind="policy",
                dtype=torch.float32,
                vocab_size=tiny.VOCAB,
                seed=5,
            )
            if with_liger:
                functions = lean_model.liger_functions(products_are_kept=False)
                assert put_in(model.hf, functions) == Replaced(norms=norms, rotaries=2, mlps=2)
            outputs = run(model, rows, packed=True)
            results.append((outputs, gradient_of(model, outputs)))
        for ours, theirs in zip(*results, strict=True):
            assert_close(ours, theirs)


def compare_selective(folder: str) -> None:
    """Selective recomputation: gradients of one layer with Liger's functions against those without."""
    from tests.unit.engine import tiny
    from tests.unit.models.test_packed_forward import gradient_of, run
    from verl_like.models import blocks
    from verl_like.models.lean_model import put_in

    teach_the_interpreter()
    rows = tiny.experience(2, max_response=4)
    path, gradients = tiny.model_folder(Path(folder), "llama", num_hidden_layers=1), []
    for kept in (None, True, False):
        config = ModelConfig(path=path)
        hf_config = loading.load_hf_config(config)
        model = loading.build_token_model(
            config, hf_config, kind="policy", dtype=torch.float32, vocab_size=tiny.VOCAB, seed=5
        )
        blocks.enable_checkpointing(model.hf, selective=True)
        if kept is not None:
            put_in(model.hf, lean_model.liger_functions(products_are_kept=kept))
        model.train()
        gradient = gradient_of(model, run(model, rows, packed=True))
        gradients.append(torch.cat([g.flatten() for g in gradient.values()]))
    plain, right, rotated_twice = gradients
    torch.testing.assert_close(right, plain, rtol=1e-4, atol=1e-4)
    assert float((rotated_twice - plain).norm() / plain.norm()) > 0.01  # what Liger's rotary embedding would do here


@has_liger
def test_kernels_equal_transformers(tmp_path: Path) -> None:
    """All layers at once, and selected ones."""
    code = "from tests.unit.models.test_liger import compare, compare_selective; "
    code += f"compare({str(tmp_path / 'all')!r}); compare_selective({str(tmp_path / 'selective')!r})"
    run_interpreted(code, timeout_s=280)


@pytest.mark.parametrize(
    ("config", "device", "installed", "message"),
    [
        (Qwen2Config(), CPU, True, "needs a CUDA device: set it to False"),
        (Qwen2Config(), CUDA, False, r"pip install 'verl_like\[liger\]'"),
        (GPT2Config(), CUDA, True, "not available for model type 'gpt2'"),
    ],
)
def test_refusals_come_before_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, config: object, device: torch.device, installed: bool, message: str
) -> None:
    monkeypatch.setattr(lean_model.importlib.util, "find_spec", lambda _: object() if installed else None)
    with pytest.raises(ValueError, match=message):
        loading.check_backend(ModelConfig(use_liger=True), config, device)  # type: ignore[arg-type]


def test_a_known_model_passes_and_false_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_model.importlib.util, "find_spec", lambda _: object())
    loading.check_backend(ModelConfig(use_liger=True), Qwen2Config(), CUDA)
    loading.check_backend(ModelConfig(use_liger=False), GPT2Config(), CPU)
