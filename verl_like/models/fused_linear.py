"""Log-prob and entropy of given tokens straight from hidden states and the head's weight, without a [T, V] tensor.

For logits z = h W^T / temperature over V entries and target y:
    log_prob = z_y - logsumexp(z),            d log_prob / dz = onehot(y) - p
    entropy  = logsumexp(z) - sum_j p_j z_j,  d entropy / dz_j = -p_j (log p_j + entropy)
Both are computed in chunks of tokens; the backward pass computes a chunk's logits again. The softmax and the sum over
chunks of the weight's gradient are float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**26  # logits of one chunk: 256 MB in float32


def linear_log_prob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob [N] of the targets and, if asked for, entropy [N]; float32, differentiable in hidden and weight.

    `vocab_size`: the softmax runs over the first so many rows of the weight (a vocabulary padded beyond the tokenizer).
    """
    vocab = weight_VH.shape[0] if vocab_size is None else min(vocab_size, weight_VH.shape[0])
    chunk = max(1, chunk_elements // vocab)
    log_prob, entropy = _LinearLogProb.apply(
        hidden_NH, weight_VH, targets_N, 1.0 / temperature, vocab, with_entropy, chunk
    )
    return log_prob, entropy if with_entropy else None


def full_logits_log_prob(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The same through a full [N, V] logits tensor and autograd: the reference that the fused function must equal."""
    logits = (hidden_NH @ weight_VH[:vocab_size].t()).to(_compute_dtype(hidden_NH)) / temperature
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else None
    return log_p.gather(1, targets_N[:, None])[:, 0], entropy


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        inverse_temperature: float,
        vocab: int,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        lse = hidden.new_empty(len(hidden), dtype=_compute_dtype(hidden))
        log_prob, entropy = torch.empty_like(lse), torch.zeros_like(lse)
        rows = weight[:vocab]
        for part in _chunks(len(hidden), chunk):
            logits = _logits(hidden[part], rows, inverse_temperature)
            lse[part] = torch.logsumexp(logits, -1)
            log_prob[part] = logits.gather(1, targets[part, None])[:, 0] - lse[part]
            if with_entropy:
                p = (logits - lse[part, None]).exp_()
                entropy[part] = lse[part] - p.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.settings = (inverse_temperature, vocab, with_entropy, chunk)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        inverse_temperature, vocab, with_entropy, chunk = ctx.settings
        rows = weight[:vocab]
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=_compute_dtype(weight)) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(hidden), chunk):
            centred = _logits(hidden[part], rows, inverse_temperature).sub_(lse[part, None])
            p = centred.exp()
            if with_entropy:
                centred.add_(entropy[part, None]).mul_(grad_entropy[part, None])
                centred.add_(grad_log_prob[part, None]).mul_(p).neg_()
            else:
                centred = p.mul_(-grad_log_prob[part, None])
            centred.scatter_add_(1, targets[part, None], grad_log_prob[part, None].to(centred.dtype))
            grad_logits = centred.mul_(inverse_temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ rows
            if grad_weight is not None:
                _accumulate(grad_weight[:vocab], grad_logits, hidden[part])
        return grad_hidden, grad_weight, None, None, None, None, None


def _logits(hidden: Tensor, rows: Tensor, inverse_temperature: float) -> Tensor:
    logits = (hidden @ rows.t()).to(_compute_dtype(hidden))
    return logits if inverse_temperature == 1.0 else logits.mul_(inverse_temperature)


def _accumulate(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    if total.dtype == hidden.dtype:
        total.addmm_(grad_logits.t(), hidden)
    else:
        total.add_(grad_logits.t() @ hidden)
