"""The Triton kernels without a GPU: in Triton's interpreter against torch, and compiled ahead for the cards.

The interpreter runs in a process of its own: the choice is made at import.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.models.interpreter import run_interpreted
from verl_like.models.fused_chunks import Coefficients
from verl_like.models.fused_linear import Head, fused_reductions

WANT = frozenset({"log_probs", "entropy", "sum_pi_squared"})
# Types of the kernels' arguments, as they are launched.
POINTERS = dict.fromkeys(("z_ptr", "out_ptr", "lse_ptr", "label_ptr", "a_ptr", "b_ptr", "constant_ptr"), "*fp32")
TYPES = POINTERS | {"target_ptr": "*i64", "out_stride": "i32", "z_stride": "i32", "vocab": "i32", "BLOCK": "constexpr"}
FORWARD = ["z_ptr", "target_ptr", "out_ptr", "out_stride", "z_stride", "vocab", "BLOCK"]
BACKWARD = ["z_ptr", "target_ptr", "lse_ptr", "label_ptr", "a_ptr", "b_ptr", "constant_ptr"]
ARGUMENTS = {"_forward_kernel": FORWARD, "_backward_kernel": [*BACKWARD, "z_stride", "vocab", "BLOCK"]}
# Of 128 threads, with 128 registers each: four programs are on a multiprocessor at a time (65,536 registers).
MOST_REGISTERS, MOST_SHARED_BYTES = 128, 2048


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


def compare_shapes() -> None:
    """Both kernels against formulas in float64: one logit, odd numbers, rows wider than their logits, -inf."""
    from verl_like.models import fused_triton

    fused_triton._BLOCK = 16
    g = torch.Generator().manual_seed(1)
    for tokens, vocab, width in ((1, 1, 1), (3, 15, 15), (2, 16, 24), (4, 17, 17), (5, 18, 18), (2, 101, 128)):
        z_cV = 5 * torch.randn(tokens, width, generator=g)[:, :vocab]
        targets_c = torch.randint(vocab, (tokens,), generator=g)
        if vocab > 17:  # a first block of -inf alone, and one in the midst; the last row keeps its target alone
            z_cV[0, :16] = z_cV[:, vocab - 1] = -torch.inf
            targets_c[:] = vocab - 2
            z_cV[-1, : vocab - 2] = -torch.inf
        label, log_p, p, constant = torch.randn(4, tokens, generator=g)
        values, lse_c = fused_triton.reduce_rows(z_cV, targets_c)
        expected, slope = formulas(z_cV, targets_c, label, log_p, p, constant)
        for name, value in values.items():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-5)
        at = Coefficients(label=label, log_p=log_p, p=p, gap=None, constant=constant)
        ours = fused_triton.slope_rows_(z_cV, lse_c, targets_c, at)
        torch.testing.assert_close(ours.double(), slope, rtol=1e-5, atol=1e-5)


def formulas(z_cV: torch.Tensor, targets_c: torch.Tensor, *coefficients: torch.Tensor) -> tuple[dict[str, Any], Any]:
    """The reductions and the slope in float64, with 0 log 0 = 0."""
    label, a, b, constant = (t.double()[:, None] for t in coefficients)
    log_p_cV = torch.log_softmax(z_cV.double(), -1)
    p_cV = log_p_cV.exp()
    expected = {
        "log_probs": log_p_cV.gather(1, targets_c[:, None])[:, 0],
        "entropy": torch.special.entr(p_cV).sum(-1),
        "sum_pi_squared": p_cV.square().sum(-1),
    }
    finite_cV = log_p_cV.masked_fill(p_cV == 0, 0.0)
    slope = p_cV * (a * finite_cV + b * p_cV + constant)
    return expected, slope.scatter_add(1, targets_c[:, None], label)


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@needs_triton
def test_kernels_equal_the_torch_path() -> None:
    code = "from tests.unit.models.test_fused_triton import compare, compare_shapes; compare(); compare_shapes()"
    run_interpreted(code, timeout_s=120)


@needs_triton
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_kernels_compile_for_hopper_and_blackwell(name: str, capability: int, tmp_path: Path) -> None:
    """To machine code, with this Triton's own assembler, without spills; no GPU takes part."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from verl_like.models import fused_triton

    kernel = getattr(fused_triton, name)
    assert kernel.arg_names == ARGUMENTS[name], "launches pass them by place: change both, and the types above"
    signature = {argument: TYPES[argument] for argument in kernel.arg_names}
    source = ASTSource(kernel, signature, {"BLOCK": fused_triton._BLOCK})
    target = GPUTarget("cuda", capability, 32)
    compiled = compile(source, target=target, options=fused_triton.FUSED_MULTIPLY_ADD)
    assert compiled.metadata.enable_fp_fusion is True and compiled.metadata.num_warps == 4
    found = resources(compiled.asm["cubin"], tmp_path / "kernel.cubin")
    assert found["REG"] <= MOST_REGISTERS and found["SHARED"] <= MOST_SHARED_BYTES, found
    assert found["STACK"] == 0 == found["LOCAL"], f"registers are spilled: {found}"


def resources(cubin: bytes, file: Path) -> dict[str, int]:
    """What a kernel needs, by the tool in Triton's wheel: registers a thread, bytes of stack, local and shared."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    file.write_bytes(cubin)
    said = subprocess.run([str(tool), "--dump-resource-usage", str(file)], capture_output=True, text=True, check=True)
    return {name: int(count) for name, count in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", said.stdout)}


def test_the_default_of_triton_is_not_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both launches say whether products and sums are one rounding."""
    from verl_like.models import fused_triton

    said: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return lambda *tensors, **options: said.append(options)

    for name in ARGUMENTS:
        monkeypatch.setattr(fused_triton, name, Kernel())
    z_cV, targets_c, zero_c = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    fused_triton.reduce_rows(z_cV, targets_c)
    fused_triton.slope_rows_(
        z_cV, zero_c, targets_c, Coefficients(label=None, log_p=None, p=None, gap=None, constant=zero_c)
    )
    assert said == [{"enable_fp_fusion": True}] * 2
