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


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@needs_triton
def test_kernels_equal_the_torch_path() -> None:
    code = "from tests.unit.models.test_fused_triton import compare; compare()"
    run_interpreted(code, timeout_s=120)


@needs_triton
def test_kernels_compile_for_hopper() -> None:
    """To machine code, with this Triton's own assembler; no GPU takes part."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from verl_like.models import fused_triton

    numbers = {"vocab": "i32", "z_stride": "i32", "out_stride": "i32", "target_ptr": "*i64", "BLOCK": "constexpr"}
    for kernel in (fused_triton._forward_kernel, fused_triton._backward_kernel):
        signature = {name: numbers.get(name, "*fp32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, {"BLOCK": fused_triton._BLOCK})
        assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
