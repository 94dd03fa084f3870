"""Per-token numbers (log-prob, entropy ...) from hidden states and the head's weight, without a [N, V] tensor.

For z = cap(scale * (h W^T + bias)) / temperature over V entries, p = softmax(z) and a target y, the value and the
gradient in z_j of each reduction are
    log_probs       log p_y                             onehot(y)_j - p_j
    entropy         H = -sum_j p_j log p_j              -p_j (log p_j + H)
    sum_pi_squared  S = sum_j p_j^2                     2 p_j (p_j - S)
    full_kl         K = sum_j p_j (log p_j - log q_j)   p_j (log p_j - log q_j - K); q, the reference's, is held fixed
    jsd             J = (KL(p || m) + KL(q || m)) / 2   p_j (log p_j - log m_j - KL(p || m)) / 2; m = (p + q) / 2
    chosen_log_probs  log p_k of K chosen ids k         onehot(k)_j - p_j of each
so any mixture of them is p_j times a linear form: one pass over a chunk of logits (fused_chunks.py).

Work: the head's product once forward and three times backward (logits again, hidden states, weight). Where all logits
are few (`KEEP_ELEMENTS`) they are kept, and the second computation falls away. Tokens go in chunks; at most three
copies of a chunk live at a time. Softmax, reductions and the sum of the weight's gradient over chunks are float32
(float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from verl_like.models import exact, fused_chunks
from verl_like.models.fused_chunks import (
    CHOSEN,
    ENTROPY,
    FULL_KL,
    JSD,
    LOG_PROBS,
    REDUCTIONS,
    SUM_PI_SQUARED,
    TILT,
    Coefficients,
    LogitRule,
)

CHUNK_ELEMENTS = 2**26  # logits of one chunk: 256 MB in float32
KEEP_ELEMENTS = 2**22  # up to so many logits (16 MB in float32) are kept for the backward pass
_SLAB_ELEMENTS = 2**24  # of the weight's gradient, where a chunk's share needs a temporary of lower precision

Backend = Literal["torch", "triton"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """Language-model head: logits = cap(scale * (h W^T + bias)) over the first `vocab_size` rows of the weight.

    `vocab_size`: fewer than the weight's rows where the vocabulary is padded beyond the tokenizer; None: all rows.
    `softcap`: c of cap(x) = c * tanh(x / c) (Gemma 2, arXiv 2408.00118, section 2), applied before the temperature.
    `exact`: a token's log-probs do not depend on the others of a call (exact.py).
    """

    weight_VH: Tensor
    bias_V: Tensor | None = None
    vocab_size: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    exact: bool = False

    def rows(self) -> int:
        """Number of logits."""
        rows = self.weight_VH.shape[0]
        return rows if self.vocab_size is None else min(self.vocab_size, rows)

    def logits(self, hidden_cH: Tensor) -> Tensor:
        """Compute h W^T + bias, [c, V] in float32: a new tensor."""
        if self.exact:  # of all rows, as a model that samples computes them
            found = exact.linear(hidden_cH, self.weight_VH, self.bias_V)
            return found[:, : self.rows()].to(compute_dtype(hidden_cH)).clone()
        logits = _matmul(hidden_cH, self.weight_VH[: self.rows()].t(), compute_dtype(hidden_cH))
        return logits if self.bias_V is None else logits.add_(self.bias_V[: self.rows()])

    def widened(self, hidden_NH: Tensor, a_rH: Tensor, b_Vr: Tensor, scale: float) -> tuple[Tensor, Head]:
        """Add scale * B A to the weight, as r more columns of hidden states and weight: no sum of both is rounded."""
        low_Nr = hidden_NH @ a_rH.to(hidden_NH.dtype).t() * scale
        weight = torch.cat([self.weight_VH, b_Vr.to(self.weight_VH.dtype)], 1)
        return torch.cat([hidden_NH, low_Nr], 1), replace(self, weight_VH=weight)

    def rule(self, temperature: float) -> LogitRule:
        """Transformation of the logits before the softmax."""
        return LogitRule(scale=self.scale, softcap=self.softcap, temperature=temperature)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """Other distribution of `full_kl` and `jsd`: hidden states of the same tokens, and their head. No gradient enters.

    mine_N: the tokens that are compared with this one, of several; None: all.
    """

    hidden_NH: Tensor
    head: Head
    mine_N: Tensor | None = None


References = tuple[Reference, ...]


def fused_reductions(
    hidden_NH: Tensor,
    head: Head,
    targets_N: Tensor,
    want: frozenset[str],
    *,
    temperature: float = 1.0,
    references: References = (),
    chosen_NK: Tensor | None = None,
    backend: Backend = "torch",
    chunk_elements: int = CHUNK_ELEMENTS,
) -> dict[str, Tensor]:
    """Compute {name: [N]} in float32 for every name of `want` ([N, K] of chosen_log_probs).

    Differentiable in hidden, weight and bias.

    Args:
        hidden_NH: final hidden states of the tokens.
        head: the output head.
        targets_N: target of each token, int64.
        want: names out of REDUCTIONS.
        temperature: logits are divided by it.
        references: the other distributions of full_kl or jsd, each of some tokens.
        chosen_NK: ids of chosen_log_probs, int64.
        backend: "torch", or "triton" for kernels that touch each logit once (CUDA; full_kl, jsd, chosen_log_probs and
            float64 stay with torch).
        chunk_elements: largest number of logits at a time.

    Raises ValueError for an unknown name, and for full_kl without a reference of the same vocabulary.
    """
    names = _checked(want, head, references)
    plain = {FULL_KL, JSD, CHOSEN} & set(names)
    call = _Call(
        names=names,
        head=head,
        temperature=temperature,
        references=references if {FULL_KL, JSD} & plain else (),
        chunk=max(1, chunk_elements // head.rows()),
        keep=backend == "torch" and hidden_NH.shape[0] * head.rows() <= min(KEEP_ELEMENTS, chunk_elements),
        triton=backend == "triton" and not plain and compute_dtype(hidden_NH) == torch.float32,
        chosen_NK=chosen_NK if CHOSEN in names else None,
    )
    values = _FusedReductions.apply(hidden_NH, head.weight_VH, head.bias_V, targets_N, call)
    return dict(zip(names, values, strict=True))


def full_logits_reductions(
    hidden_NH: Tensor,
    head: Head,
    targets_N: Tensor,
    want: frozenset[str],
    *,
    temperature: float = 1.0,
    references: References = (),
    chosen_NK: Tensor | None = None,
    entropy_rows: int | None = None,
    recompute_entropy: bool = False,
) -> dict[str, Tensor]:
    """Compute `fused_reductions` through a full [N, V] logits tensor and autograd: the values it must equal.

    Args:
        hidden_NH: final hidden states of the tokens.
        head: the output head.
        targets_N: target of each token, int64.
        want: names out of REDUCTIONS.
        temperature: logits are divided by it.
        references: the other distributions of full_kl or jsd.
        chosen_NK: ids of chosen_log_probs.
        entropy_rows: so many tokens at a time in the entropy; None: all.
        recompute_entropy: do not keep the entropy's [N, V] intermediates for the backward pass, which computes them
            again.
    """
    log_p, values = _plain_log_softmax(hidden_NH, head, temperature), {}
    for name in _checked(want, head, references):
        if name == LOG_PROBS:
            values[name] = log_p.gather(1, targets_N[:, None])[:, 0]
        elif name == ENTROPY:
            parts = log_p.split(entropy_rows or max(1, len(log_p)))
            of_part = partial(checkpoint, _plain_entropy, use_reentrant=False) if recompute_entropy else _plain_entropy
            values[name] = torch.cat([of_part(part) for part in parts])
        elif name == SUM_PI_SQUARED:
            values[name] = log_p.exp().square().sum(-1)
        elif name == CHOSEN:
            assert chosen_NK is not None
            values[name] = log_p.gather(1, chosen_NK)
        else:
            log_q = torch.zeros_like(log_p)
            for other in references:
                found = _plain_log_softmax(other.hidden_NH, other.head, temperature).detach()
                log_q = found if other.mine_N is None else torch.where(other.mine_N[:, None], found, log_q)
            log_m = log_q if name == FULL_KL else (0.5 * (log_p.exp() + log_q.exp())).log()
            values[name] = (log_p.exp() * (log_p - log_m)).sum(-1)
            if name == JSD:
                values[name] = 0.5 * (values[name] + (log_q.exp() * (log_q - log_m)).sum(-1))
    return values


@torch.no_grad()
def top_log_probs(
    hidden_NH: Tensor, head: Head, k: int, *, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Find the k likeliest ids of each token: (log-probs [N, k] float32, ids [N, k] int32), the likeliest first."""
    k, chunk = min(k, head.rows()), max(1, chunk_elements // head.rows())
    values = hidden_NH.new_empty(len(hidden_NH), k, dtype=compute_dtype(hidden_NH))
    ids = torch.empty(values.shape, dtype=torch.int32, device=values.device)
    for start in range(0, len(hidden_NH), chunk):
        part = slice(start, start + chunk)
        z = head.rule(temperature).apply_(head.logits(hidden_NH[part]))
        top = z.topk(k, dim=-1)
        values[part], ids[part] = top.values - torch.logsumexp(z, -1, keepdim=True), top.indices.int()
    return values, ids


def _plain_entropy(log_p_NV: Tensor) -> Tensor:
    return -(log_p_NV.exp() * log_p_NV).sum(-1)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Precision of softmax and sums: float32, or float64 for float64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _checked(want: frozenset[str], head: Head, references: References) -> tuple[str, ...]:
    if not want <= set(REDUCTIONS):
        raise ValueError(f"unknown reductions {sorted(want - set(REDUCTIONS))}: use {', '.join(REDUCTIONS)}")
    for name in sorted(want & {FULL_KL, JSD}):
        if not references:
            raise ValueError(f"{name} needs the reference model's hidden states and head")
        if {FULL_KL, JSD} <= want:
            raise ValueError("full_kl and jsd are compared one at a time")
        for rows in (other.head.rows() for other in references):
            if rows != head.rows():
                raise ValueError(
                    f"{name} compares distributions over one vocabulary, but the policy has {head.rows()} logits "
                    f"and the reference {rows}"
                )
    return tuple(name for name in REDUCTIONS if name in want)


def _plain_log_softmax(hidden: Tensor, head: Head, temperature: float) -> Tensor:
    logits = (hidden @ head.weight_VH[: head.rows()].t()).to(compute_dtype(hidden))
    if head.bias_V is not None:
        logits = logits + head.bias_V[: head.rows()].to(logits.dtype)
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return (logits / temperature).log_softmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    """Arguments of one call.

    chunk: tokens at a time.
    keep: log-probs of all V stay for the backward pass.
    """

    names: tuple[str, ...]
    head: Head
    temperature: float
    references: References
    chunk: int
    keep: bool
    triton: bool
    chosen_NK: Tensor | None

    def chunks(self, total: int) -> Iterator[slice]:
        for start in range(0, total, self.chunk):
            yield slice(start, min(start + self.chunk, total))

    def gap(self, log_p_cV: Tensor, part: slice) -> tuple[Tensor | None, Tensor | None]:
        """Compute log p - log q of a chunk, [c, V]; for jsd log p - log m, and KL(q || m) [c]. None without them."""
        if not self.references:
            return None, None
        first = self.references[0]
        if first.mine_N is None:
            log_q_cV = self._log_q(first, first.hidden_NH[part])
        else:
            log_q_cV = torch.zeros_like(log_p_cV)
            for other in self.references:
                assert other.mine_N is not None
                mine = other.mine_N[part]
                log_q_cV[mine] = self._log_q(other, other.hidden_NH[part][mine])
        if JSD in self.names:
            return fused_chunks.mixture_gap(log_p_cV, log_q_cV)
        return log_q_cV.neg_().add_(log_p_cV), None

    def _log_q(self, other: Reference, hidden_cH: Tensor) -> Tensor:
        z = other.head.rule(self.temperature).apply_(other.head.logits(hidden_cH.detach()))
        return fused_chunks.log_softmax_(z)[0]

    def chosen(self, part: slice) -> Tensor | None:
        """The chosen ids of a chunk."""
        return None if self.chosen_NK is None else self.chosen_NK[part]


class _FusedReductions(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, call: _Call
    ) -> tuple[Tensor, ...]:
        lse = hidden.new_empty(len(hidden), dtype=compute_dtype(hidden))
        values = {name: torch.empty_like(lse) for name in call.names}
        if call.chosen_NK is not None:
            values[CHOSEN] = lse.new_empty(call.chosen_NK.shape)
        if JSD in call.names:
            values[TILT] = torch.empty_like(lse)
        rule, kept = call.head.rule(call.temperature), []
        for part in call.chunks(len(hidden)):
            if call.triton:
                z = rule.apply_(call.head.logits(hidden[part]))
                rows, lse[part] = _triton().reduce_rows(z, targets[part])
                for name, value in values.items():
                    value[part] = rows[name]
                del z
                continue
            softmax = fused_chunks.log_softmax if call.head.exact else fused_chunks.log_softmax_
            log_p, lse[part] = softmax(rule.apply_(call.head.logits(hidden[part])))
            gap, other = call.gap(log_p, part)
            found = fused_chunks.reduce_chunk(log_p, gap, targets[part], call.names, call.chosen(part), other)
            for name, value in found.items():
                values[name][part] = value
            if call.keep and any(ctx.needs_input_grad):
                kept = [log_p, gap]
            del log_p, gap
        ctx.save_for_backward(hidden, weight, bias, targets, lse, *values.values(), *kept)
        ctx.call = call
        ctx.set_materialize_grads(False)  # an entropy that is a metric alone costs nothing in the backward pass
        return tuple(values[name] for name in call.names)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: _Call = ctx.call
        hidden, weight, bias, targets, lse, *rest = ctx.saved_tensors
        call = replace(call, head=replace(call.head, weight_VH=weight, bias_V=bias))
        names = (*call.names, TILT) if JSD in call.names else call.names
        values, kept = dict(zip(names, rest, strict=False)), rest[len(names) :]
        given = {name: grad for name, grad in zip(call.names, upstream, strict=True) if grad is not None}
        at = fused_chunks.coefficients(given, values)
        at = at.times(call.head.scale / call.temperature)  # d z / d logits: cheaper here than on every logit
        rows = weight[: call.head.rows()]
        wants = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if wants[0] else None
        grad_weight = torch.zeros_like(weight, dtype=compute_dtype(weight)) if wants[1] else None
        grad_bias = torch.zeros_like(bias, dtype=compute_dtype(bias)) if bias is not None and wants[2] else None
        for part in call.chunks(len(hidden)):
            slope = _slope(call, hidden, lse, targets, at.of(part), part, kept)
            if grad_bias is not None:
                grad_bias[: len(rows)] += slope.sum(0)
            grad_logits = slope.to(hidden.dtype)
            del slope  # nothing of a chunk may live on while the next one's logits are computed
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ rows
            if grad_weight is not None:
                _accumulate(grad_weight[: len(rows)], grad_logits, hidden[part])
            del grad_logits
        return grad_hidden, grad_weight, grad_bias, None, None


def _triton() -> ModuleType:
    """Import the Triton kernels at their first use: triton comes with torch's CUDA builds alone."""
    from verl_like.models import fused_triton

    return fused_triton


def _slope(
    call: _Call, hidden: Tensor, lse: Tensor, targets: Tensor, at: Coefficients, part: slice, kept: list[Tensor | None]
) -> Tensor:
    """Gradient of the loss in scale / temperature * logits of a chunk, [c, V]; `kept`: what `forward` left of it."""
    rule = call.head.rule(call.temperature)
    if not call.triton:
        log_p, gap = kept or _recompute(call, hidden, lse, part)
        assert log_p is not None
        chosen = call.chosen(part)
        return fused_chunks.slope_chunk(
            log_p, gap, lse[part], targets[part], at, rule, reuse=not kept, chosen_cK=chosen
        )
    z = rule.apply_(call.head.logits(hidden[part]))
    inner = None if rule.softcap is None else rule.cap_slope_(z.clone())
    slope = _triton().slope_rows_(z, lse[part], targets[part], at)
    return slope if inner is None else slope.mul_(inner)


def _recompute(call: _Call, hidden: Tensor, lse: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
    z = call.head.rule(call.temperature).apply_(call.head.logits(hidden[part]))
    log_p = z.sub_(lse[part, None])
    return log_p, call.gap(log_p, part)[0]


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute a @ b in `dtype`; where the device can, a half-precision product is never rounded to half precision."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _accumulate(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Add grad_logits^T hidden to total [V, H]; through slabs of rows where the product has another precision."""
    if total.dtype == hidden.dtype:
        total.addmm_(grad_logits.t(), hidden)
        return
    slab = max(1, _SLAB_ELEMENTS // hidden.shape[1])
    for start in range(0, len(total), slab):
        part = slice(start, start + slab)
        total[part].add_(_matmul(grad_logits[:, part].t(), hidden, total.dtype))
