"""Triton kernels for the chunk arithmetic of `fused_chunks.py`, which touch each logit once. CUDA; imported lazily.

One program works on one token's row of logits z (float32, after scale, soft-cap and temperature). Forward: an online
softmax (running maximum m, sums of e^(z-m), z e^(z-m) and e^(2(z-m)), rescaled when m grows) gives logsumexp,
log-prob, entropy and the sum of squared probabilities in one pass. Backward: p = e^(z - lse), and the gradient
p (a log p + b p + constant) + label at the target, in place. A logit of -inf has probability 0 and adds nothing.
Checked on a CPU by Triton's interpreter, and compiled ahead for Hopper and Blackwell; not yet run on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_like.models.fused_chunks import ENTROPY, LOG_PROBS, SUM_PI_SQUARED, Coefficients

REDUCTIONS = frozenset({LOG_PROBS, ENTROPY, SUM_PI_SQUARED})
_BLOCK = 4096  # logits a program holds at a time
# Products and sums become one rounding. Said here: Triton 3.10 changes its default, and with it the last bits.
FUSED_MULTIPLY_ADD = {"enable_fp_fusion": True}


def reduce_rows(z_cV: Tensor, targets_c: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Compute ({name: [c]} for all of REDUCTIONS, logsumexp [c]); the logits stay as they are."""
    out = torch.empty(4, len(z_cV), dtype=torch.float32, device=z_cV.device)
    _forward_kernel[(len(z_cV),)](  # pyright: ignore[reportIndexIssue]
        *(z_cV, targets_c, out, out.stride(0), z_cV.stride(0), z_cV.shape[1], _block(z_cV.shape[1])),
        **FUSED_MULTIPLY_ADD,
    )
    return {LOG_PROBS: out[0], ENTROPY: out[1], SUM_PI_SQUARED: out[2]}, out[3]


def slope_rows_(z_cV: Tensor, lse_c: Tensor, targets_c: Tensor, at: Coefficients) -> Tensor:
    """Compute the gradient of the loss in z, in place of z."""
    zero = torch.zeros_like(at.constant)
    label, log_p, p = (zero if t is None else t.contiguous() for t in (at.label, at.log_p, at.p))
    _backward_kernel[(len(z_cV),)](  # pyright: ignore[reportIndexIssue]
        *(z_cV, targets_c, lse_c, label, log_p, p, at.constant.contiguous()),
        *(z_cV.stride(0), z_cV.shape[1], _block(z_cV.shape[1])),
        **FUSED_MULTIPLY_ADD,
    )
    return z_cV


def _block(vocab: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(vocab))


@triton.jit
def _forward_kernel(z_ptr, target_ptr, out_ptr, out_stride, z_stride, vocab, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = z_ptr + token * z_stride
    top = -float("inf")
    total, weighted, squared = 0.0, 0.0, 0.0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < vocab
        z = tl.load(row + at, mask=inside, other=-float("inf"))
        new_top = tl.maximum(top, tl.max(z, 0))
        level = tl.where(new_top == -float("inf"), 0.0, new_top)  # so long as all are -inf: exp(-inf) is 0
        shrink = tl.exp(top - level)
        e = tl.exp(z - level)
        total = total * shrink + tl.sum(e, 0)
        weighted = weighted * shrink + tl.sum(tl.where(z == -float("inf"), 0.0, z) * e, 0)
        squared = squared * shrink * shrink + tl.sum(e * e, 0)
        top = new_top
    lse = top + tl.log(total)
    z_target = tl.load(row + tl.load(target_ptr + token))
    tl.store(out_ptr + token, z_target - lse)
    tl.store(out_ptr + out_stride + token, lse - weighted / total)
    tl.store(out_ptr + 2 * out_stride + token, squared / (total * total))
    tl.store(out_ptr + 3 * out_stride + token, lse)


@triton.jit
def _backward_kernel(
    z_ptr, target_ptr, lse_ptr, label_ptr, a_ptr, b_ptr, constant_ptr, z_stride, vocab, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    row = z_ptr + token * z_stride
    lse, target = tl.load(lse_ptr + token), tl.load(target_ptr + token)
    label, a, b = tl.load(label_ptr + token), tl.load(a_ptr + token), tl.load(b_ptr + token)
    constant = tl.load(constant_ptr + token)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < vocab
        log_p = tl.load(row + at, mask=inside, other=-float("inf")) - lse
        p = tl.exp(log_p)
        log_p = tl.where(log_p == -float("inf"), 0.0, log_p)  # p is 0
        slope = p * (a * log_p + b * p + constant) + tl.where(at == target, label, 0.0)
        tl.store(row + at, slope, mask=inside)
