"""Reduction of one chunk of logits to per-token numbers, and the gradient of the logits, in plain torch operations.

Notation and formulas: verl_like/models/fused_linear.py. A chunk's logits arrive as h W^T + bias in float32 and are
overwritten. `fused_triton.py` has the same two functions as kernels that touch each logit once.
Letters: c tokens of the chunk, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_PROBS, ENTROPY, SUM_PI_SQUARED, FULL_KL = "log_probs", "entropy", "sum_pi_squared", "full_kl"
JSD, CHOSEN = "jsd", "chosen_log_probs"
REDUCTIONS = (LOG_PROBS, ENTROPY, SUM_PI_SQUARED, FULL_KL, JSD, CHOSEN)
TILT = "tilt"  # sum_j p_j (log p_j - log m_j), which the gradient of jsd needs beside its value


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRule:
    """Transformation of logits: z = cap(scale * logits) / temperature with cap(x) = softcap * tanh(x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def apply_(self, logits_cV: Tensor) -> Tensor:
        """Turn logits into z, in place."""
        if self.scale != 1.0:
            logits_cV.mul_(self.scale)
        if self.softcap is not None:
            logits_cV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_cV if self.temperature == 1.0 else logits_cV.div_(self.temperature)

    def cap_slope_(self, z_cV: Tensor) -> Tensor:
        """Compute d cap(x) / d x = 1 - (cap(x) / softcap)^2 in place of z; only with a soft-cap."""
        assert self.softcap is not None
        return z_cV.mul_(self.temperature / self.softcap).square_().neg_().add_(1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coefficients:
    """Coefficients of the gradient of the loss in log p_j, per token.

    The gradient is p_j (a log p_j + b p_j + d (log p_j - log q_j) + constant), plus `label` at the target and `chosen`
    [c, K] at chosen ids. A coefficient that no wanted reduction has is None.
    """

    label: Tensor | None
    log_p: Tensor | None
    p: Tensor | None
    gap: Tensor | None
    constant: Tensor
    chosen: Tensor | None = None

    def of(self, part: slice) -> Coefficients:
        """Select the coefficients of a chunk's tokens."""
        return self._each(lambda t: t[part])

    def times(self, factor: float) -> Coefficients:
        """Coefficients of `factor` times the loss."""
        return self if factor == 1.0 else self._each(lambda t: t * factor)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Coefficients:
        changed = {name: None if (t := getattr(self, name)) is None else change(t) for name in self.__slots__}
        return Coefficients(**changed)


def coefficients(upstream: dict[str, Tensor], values: dict[str, Tensor]) -> Coefficients:
    """Join the gradients of all reductions, given each one's upstream gradient and value."""
    first = next(iter(values.values()))
    constant = first.new_zeros(len(first))
    if LOG_PROBS in upstream:
        constant = constant - upstream[LOG_PROBS]
    if ENTROPY in upstream:
        constant = constant - upstream[ENTROPY] * values[ENTROPY]
    if SUM_PI_SQUARED in upstream:
        constant = constant - 2.0 * upstream[SUM_PI_SQUARED] * values[SUM_PI_SQUARED]
    gap = None
    if FULL_KL in upstream:
        gap, constant = upstream[FULL_KL], constant - upstream[FULL_KL] * values[FULL_KL]
    if JSD in upstream:
        gap, constant = 0.5 * upstream[JSD], constant - 0.5 * upstream[JSD] * values[TILT]
    if CHOSEN in upstream:
        constant = constant - upstream[CHOSEN].sum(-1)
    return Coefficients(
        label=upstream.get(LOG_PROBS),
        chosen=upstream.get(CHOSEN),
        log_p=-upstream[ENTROPY] if ENTROPY in upstream else None,
        p=2.0 * upstream[SUM_PI_SQUARED] if SUM_PI_SQUARED in upstream else None,
        gap=gap,
        constant=constant,
    )


def reduce_chunk(
    log_p_cV: Tensor,
    gap_cV: Tensor | None,
    targets_c: Tensor,
    names: tuple[str, ...],
    chosen_cK: Tensor | None = None,
    other_c: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute the reductions of a chunk: {name: [c]}, of chosen_log_probs [c, K].

    gap_cV: log p - log q, for full_kl, or log p - log m, for jsd; None without them.
    chosen_cK: ids of chosen_log_probs.
    other_c: KL(q || m), for jsd.
    """
    values, p_cV = {}, None
    for name in names:
        if name == LOG_PROBS:
            values[name] = log_p_cV.gather(1, targets_c[:, None])[:, 0]
            continue
        if name == CHOSEN:
            assert chosen_cK is not None
            values[name] = log_p_cV.gather(1, chosen_cK)
            continue
        p_cV = log_p_cV.exp() if p_cV is None else p_cV
        if name == ENTROPY:
            values[name] = -_dot(p_cV, log_p_cV)
        elif name == SUM_PI_SQUARED:
            values[name] = _dot(p_cV, p_cV)
        else:
            assert gap_cV is not None
            values[name] = _dot(p_cV, gap_cV)
            if name == JSD:
                assert other_c is not None
                values |= {TILT: values[name], JSD: 0.5 * (values[name] + other_c)}
    return values


def mixture_gap(log_p_cV: Tensor, log_q_cV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (log p - log m [c, V], KL(q || m) [c]) with m = (p + q) / 2."""
    log_m_cV = torch.logaddexp(log_p_cV, log_q_cV).sub_(math.log(2.0))
    other_c = _dot(log_q_cV.exp(), log_q_cV - log_m_cV)
    return log_m_cV.neg_().add_(log_p_cV), other_c


def log_softmax_(z_cV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log p in place of z, and logsumexp [c]; return both."""
    lse_c = torch.logsumexp(z_cV, -1)
    return z_cV.sub_(lse_c[:, None]), lse_c


def log_softmax(z_cV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log p as samplers do, whose last bits are others than those of `log_softmax_`, and logsumexp [c]."""
    return torch.log_softmax(z_cV, -1), torch.logsumexp(z_cV, -1)


def slope_chunk(
    log_p_cV: Tensor,
    gap_cV: Tensor | None,
    lse_c: Tensor,
    targets_c: Tensor,
    at: Coefficients,
    rule: LogitRule,
    *,
    reuse: bool,
    chosen_cK: Tensor | None = None,
) -> Tensor:
    """Compute the gradient of the loss in scale / temperature * (h W^T + bias), [c, V].

    Args:
        log_p_cV: log-probs of the chunk.
        gap_cV: log p - log q, for full_kl, or log p - log m, for jsd; None without them.
        lse_c: logsumexp of each token's z.
        targets_c: target of each token, int64.
        at: coefficients of the gradient.
        rule: transformation of the logits.
        reuse: log_p_cV may be overwritten.
        chosen_cK: ids of chosen_log_probs.
    """
    inner = None if rule.softcap is None else rule.cap_slope_(log_p_cV + lse_c[:, None])
    if at.log_p is None and at.p is None and at.gap is None:
        slope = (log_p_cV.exp_() if reuse else log_p_cV.exp()).mul_(at.constant[:, None])
    else:
        slope = _mixture(log_p_cV, gap_cV, at, reuse=reuse)
    if at.label is not None:
        slope.scatter_add_(1, targets_c[:, None], at.label[:, None].to(slope.dtype))
    if at.chosen is not None:
        assert chosen_cK is not None
        slope.scatter_add_(1, chosen_cK, at.chosen.to(slope.dtype))
    return slope if inner is None else slope.mul_(inner)


def _mixture(log_p: Tensor, gap: Tensor | None, at: Coefficients, *, reuse: bool) -> Tensor:
    p = log_p.exp()
    slope = log_p if reuse else log_p.clone()
    if at.log_p is not None:
        slope.mul_(at.log_p[:, None]).add_(at.constant[:, None])
    else:
        slope.copy_(at.constant[:, None].expand_as(slope))
    if at.p is not None:
        slope.addcmul_(p, at.p[:, None])
    if at.gap is not None:
        assert gap is not None
        slope.addcmul_(gap, at.gap[:, None])
    return slope.mul_(p)


def _dot(a_cV: Tensor, b_cV: Tensor) -> Tensor:
    """Row-wise sum of products, without a tensor of products."""
    return torch.bmm(a_cV[:, None, :], b_cV[:, :, None])[:, 0, 0]
