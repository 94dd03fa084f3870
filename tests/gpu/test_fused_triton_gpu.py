"""The fused head on a GPU at a real vocabulary: Triton against torch, and the memory of both."""

from __future__ import annotations

import pytest
import torch

from verl_like.models.fused_linear import Backend, Head, fused_reductions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WANT = frozenset({"log_probs", "entropy", "sum_pi_squared"})


def test_equals_the_torch_path() -> None:
    results = []
    for backend in ("torch", "triton"):
        g = torch.Generator("cuda").manual_seed(0)
        options = {"generator": g, "device": "cuda", "dtype": torch.bfloat16}
        hidden = torch.randn(1000, 256, **options).requires_grad_()  # type: ignore[call-overload]
        weight = (0.1 * torch.randn(151_936, 256, **options)).requires_grad_()  # type: ignore[call-overload]
        targets = torch.randint(151_936, (1000,), generator=g, device="cuda")
        out = fused_reductions(hidden, Head(weight_VH=weight), targets, WANT, backend=backend)
        values = torch.stack([out[name] for name in sorted(WANT)])
        results.append((values.detach(), *torch.autograd.grad(values[:2].sum(), [hidden, weight])))
    for ours, expected in zip(*results, strict=True):
        assert float((ours - expected).float().norm() / expected.float().norm()) < 1e-2


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_peak_memory_of_16k_tokens(backend: Backend) -> None:
    """Under 2 GB beside the inputs, gradients of hidden states and head (0.47 GB in bfloat16) included."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(16_384, 1536, **options).requires_grad_()  # type: ignore[call-overload]
    weight = (0.02 * torch.randn(151_936, 1536, **options)).requires_grad_()  # type: ignore[call-overload]
    targets = torch.randint(151_936, (16_384,), device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = fused_reductions(
        hidden, Head(weight_VH=weight), targets, frozenset({"log_probs", "entropy"}), backend=backend
    )
    (out["log_probs"].sum() + 0.1 * out["entropy"].sum()).backward()
    peak = (torch.cuda.max_memory_allocated() - before) / 1e9
    print(f"{backend}: {peak:.2f} GB")
    assert hidden.grad is not None and weight.grad is not None
    assert peak < 2.0
