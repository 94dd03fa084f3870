"""The Triton kernels on a GPU, in bfloat16 at a real vocabulary, against the torch path."""

from __future__ import annotations

import pytest
import torch

from verl_like.models.fused_linear import Head, fused_reductions

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
