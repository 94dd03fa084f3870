"""Ratios, clamps, bounds and clip metrics in the one form that all policy losses share.

Rules: padding is set to 0 first, so that it can neither overflow nor spread NaN; a logarithm is clamped to +-20 right
before exp, and nowhere else; a ratio of a whole row is built from unclamped differences, then clamped once.

Ratios of a "sequence" (gspo, gspo_token, luspo, geo_mean, topr, vespo, kimi's penalty) are those of one ROW, also where
an episode has several: a row is what was sampled in one context, and the model gives a probability to nothing longer.
Their losses are joined by episode (aggregate.py): with seq-mean-token-mean a row weighs by its share of the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.algorithms.losses.base import PolicyBatch, TokenLoss
from verl_like.algorithms.masked import masked_fill_zero, masked_mean
from verl_like.config import ActorConfig

LOG_RATIO_LIMIT = 20.0  # a token whose probability changed by more gives no gradient, and exp() cannot overflow


def log_difference(batch: PolicyBatch) -> Tensor:
    """log_prob - old_log_prob; 0 outside the mask, so that padding cannot spread NaN."""
    return masked_fill_zero(batch.log_probs_BR - batch.old_log_probs_BR, batch.mask_BR)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, with the logarithm clamped to +-20: it cannot overflow."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def log_ratio(batch: PolicyBatch) -> Tensor:
    """log_prob - old_log_prob, clamped to +-20; 0 outside the mask."""
    return log_difference(batch).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_ratio(batch: PolicyBatch) -> Tensor:
    """Probability of each token under the trained policy over that under the old one, [B, R]."""
    return log_ratio(batch).exp()


def sequence_ratio(batch: PolicyBatch) -> Tensor:
    """Geometric mean of a row's ratios, exp(mean of log_prob - old), [B, 1] (GSPO's ratio)."""
    return bounded_exp(masked_mean(log_difference(batch), batch.mask_BR, dim=1))[:, None]


def filled_advantages(batch: PolicyBatch) -> Tensor:
    """Advantages with padding set to 0: a NaN there would reach other tokens through a ratio that a row shares."""
    return masked_fill_zero(batch.advantages_BR, batch.mask_BR)


def clip_range(actor: ActorConfig) -> tuple[float, float]:
    """Bounds of the ratio below and above 1: clip_ratio_low and clip_ratio_high, clip_ratio where they are null."""
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    return low, high


def clipped_surrogate(
    ratio_BR: Tensor, advantages_BR: Tensor, actor: ActorConfig, *, dual_clip: bool = False
) -> TokenLoss:
    """PPO's pessimistic surrogate with separate lower and upper bounds, and the dual clip where clip_ratio_c is set.

    pg_clipfrac: share of tokens whose gradient the upper or lower bound cut off; pg_clipfrac_lower: share of tokens
    (with a negative advantage) at which the dual clip's cap took over.
    """
    low, high = clip_range(actor)
    plain_BR = -advantages_BR * ratio_BR
    bounded_BR = -advantages_BR * ratio_BR.clamp(1 - low, 1 + high)
    loss_BR = torch.maximum(plain_BR, bounded_BR)
    metrics = {
        "pg_clipfrac": bounded_BR > plain_BR,
        "pg_clipfrac_lower": torch.zeros_like(bounded_BR, dtype=torch.bool),
    }
    if dual_clip and actor.clip_ratio_c is not None:
        cap_BR = -advantages_BR * actor.clip_ratio_c
        negative_BR = advantages_BR < 0
        metrics["pg_clipfrac_lower"] = negative_BR & (loss_BR > cap_BR)
        loss_BR = torch.where(negative_BR, torch.minimum(loss_BR, cap_BR), loss_BR)
    return TokenLoss(loss_BR=loss_BR, metrics_BR=metrics)


def weighted_log_probs(
    batch: PolicyBatch,
    weight_BR: Tensor | None = None,
    *,
    reward_BR: Tensor | None = None,
    metrics_BR: dict[str, Tensor] | None = None,
) -> TokenLoss:
    """-weight * A * log_prob, the weight a constant (None: 1); `reward_BR` stands in for A."""
    log_probs_BR = masked_fill_zero(batch.log_probs_BR, batch.mask_BR)
    loss_BR = -(batch.advantages_BR if reward_BR is None else reward_BR) * log_probs_BR
    if weight_BR is not None:
        loss_BR = weight_BR.detach() * loss_BR
    return TokenLoss(loss_BR=loss_BR, metrics_BR=metrics_BR or {})
