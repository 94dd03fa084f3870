"""The Triton kernels in Triton's own interpreter on a CPU, in a process of its own: the choice is made at import."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.unit.models.interpreter import run_interpreted
from verl_like.models.fused_linear import Head, fused_reductions

WANT = frozenset({"log_probs", "entropy", "sum_pi_squared"})


def compare() -> None:
    """Values and gradients against the torch path; several blocks a row, several chunks, soft-cap and temperature."""
    from verl_like.models import fused_triton

    fused_triton._BLOCK = 16
    for softcap, temperature in ((None, 1.0), (2.0, 0.7)):
        results = []
        for backend in ("torch", "triton"):
            g = torch.Generator().manual_seed(0)
            hidden, weight = (torch.randn(n, 6, generator=g).requires_grad_() for n in (9, 37))
            targets, slopes = torch.randint(35, (9,), generator=g), torch.randn(3, 9, generator=g)
            head = Head(weight_VH=weight, vocab_size=35, scale=0.5, softcap=softcap)
            out = fused_reductions(
                hidden, head, targets, WANT, temperature=temperature, backend=backend, chunk_elements=4 * 35
            )
            values = torch.stack([out[name] for name in sorted(WANT)])
            results.append((values.detach(), *torch.autograd.grad((values * slopes).sum(), [hidden, weight])))
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_equal_the_torch_path() -> None:
    code = "from tests.unit.models.test_fused_triton import compare; compare()"
    run_interpreted(code, timeout_s=120)
