"""Losses of the form -weight * A * log_prob with a constant weight: REINFORCE and what tempers it off-policy."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.algorithms.losses.base import PolicyBatch, TokenLoss
from verl_like.algorithms.losses.ratio import (
    LOG_RATIO_LIMIT,
    bounded_exp,
    clip_range,
    log_difference,
    log_ratio,
    token_ratio,
    weighted_log_probs,
)
from verl_like.algorithms.masked import masked_fill_zero, masked_mean
from verl_like.config import ActorConfig, ToprConfig

ROUNDING = 1e-8  # keeps the logarithm of 1 - p finite at p = 1


def policy_gradient(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-A * log_prob: no ratio, no clip (Williams 1992; GPG, arXiv 2504.02546). For one update per rollout batch."""
    return weighted_log_probs(batch)


def cispo(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-clip(ratio) * A * log_prob, the clipped ratio a constant (CISPO, MiniMax-M1, arXiv 2506.13585).

    No token loses its gradient. pg_clipfrac: share of tokens whose weight a bound changed.
    """
    low, high = clip_range(actor)
    ratio_BR = token_ratio(batch)
    weight_BR = ratio_BR.clamp(1 - low, 1 + high)
    return weighted_log_probs(batch, weight_BR, metrics_BR={"pg_clipfrac": weight_BR != ratio_BR})


def topr(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-w * R * log_prob; w = positive_weight where R >= 0, else negative_weight * min(ratio, 1), a constant
    (TOPR, Le Roux et al. 2025, arXiv 2503.14286, eq. 8).

    policy_loss.topr.ratio_level: seq, as published (the row's ratio, product over its tokens; the row's sign), or
    token. reward_source: R is the advantage (of a row: its mean decides the sign) or the score as graded.
    pg_clipfrac: share of tokens whose ratio was cut to 1.
    """
    options = actor.policy_loss.topr
    reward_BR = topr_reward(batch, options)
    difference_BR, sign_BR = log_difference(batch), reward_BR
    if options.ratio_level == "seq":
        difference_BR = difference_BR.sum(dim=1, keepdim=True)
        sign_BR = masked_mean(reward_BR, batch.mask_BR, dim=1)[:, None]
    ratio_BR = bounded_exp(difference_BR)
    negative_BR = sign_BR < 0
    taper_BR = options.negative_weight * ratio_BR.clamp(max=1.0)
    weight_BR = torch.where(negative_BR, taper_BR, options.positive_weight)
    cut_BR = (negative_BR & (ratio_BR > 1)).expand_as(batch.mask_BR)
    return weighted_log_probs(batch, weight_BR, reward_BR=reward_BR, metrics_BR={"pg_clipfrac": cut_BR})


def topr_reward(batch: PolicyBatch, options: ToprConfig) -> Tensor:
    """R of each token, [B, R], 0 in padding."""
    if options.reward_source == "advantage":
        return masked_fill_zero(batch.advantages_BR, batch.mask_BR)
    if batch.score_B is None:
        raise ValueError("policy_loss.topr.reward_source=score needs the scores of the rows, but the batch has none")
    return batch.score_B.to(batch.advantages_BR.dtype)[:, None] * batch.mask_BR


def vespo(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-phi * A * log_prob, phi = w^k exp(lambda (1 - w)) a constant, w the ratio of the whole row (VESPO, Shen et al.
    2026, arXiv 2602.10693).

    (k, lambda) are policy_loss.vespo_k_pos and vespo_lambda_pos where A >= 0, else vespo_k_neg and vespo_lambda_neg.
    phi is 1 at w = 1, largest at w = k / lambda, and falls off smoothly on both sides: far rows fade out.
    vespo_weight: mean of phi over tokens.
    """
    options = actor.policy_loss
    log_w_B1 = masked_fill_zero(log_ratio(batch), batch.mask_BR).sum(dim=1, keepdim=True)
    positive_BR = batch.advantages_BR >= 0
    k_BR = torch.where(positive_BR, options.vespo_k_pos, options.vespo_k_neg)
    lambda_BR = torch.where(positive_BR, options.vespo_lambda_pos, options.vespo_lambda_neg)
    # In logarithms: w^k alone would overflow where the exponential has long won.
    weight_BR = (k_BR * log_w_B1 + lambda_BR * (1 - log_w_B1.clamp(max=LOG_RATIO_LIMIT).exp())).exp()
    return weighted_log_probs(batch, weight_BR, metrics_BR={"vespo_weight": weight_BR.detach()})


def dppo_tv(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-min(ratio, c) * A * log_prob where the token's probability moved by at most the bound, else 0
    (DPPO with binary total variation, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv 2602.04879).

    Bounds of p - p_old: clip_ratio_high above where A > 0, clip_ratio_low below elsewhere; c is clip_ratio_c.
    pg_clipfrac: share of tokens outside.
    """
    low, high = clip_range(actor)
    moved_BR = probability(batch.log_probs_BR, batch) - probability(batch.old_log_probs_BR, batch)
    inside_BR = torch.where(batch.advantages_BR > 0, moved_BR <= high, moved_BR >= -low)
    return trust_region(batch, actor, inside_BR)


def dppo_kl(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """DPPO with binary KL: dppo_tv measured by the divergence of (p_old, 1 - p_old) from (p, 1 - p) (arXiv 2602.04879).

    A token outside the bound keeps its gradient where that leads back.
    """
    low, high = clip_range(actor)
    p_BR, old_p_BR = probability(batch.log_probs_BR, batch), probability(batch.old_log_probs_BR, batch)
    rest_BR = ((1 - old_p_BR + ROUNDING) / (1 - p_BR + ROUNDING)).log()
    kl_BR = -old_p_BR * log_difference(batch).detach() + (1 - old_p_BR) * rest_BR
    positive_BR = batch.advantages_BR > 0
    near_BR = kl_BR <= torch.where(positive_BR, high, low)
    back_BR = torch.where(positive_BR, p_BR <= old_p_BR, p_BR >= old_p_BR)
    return trust_region(batch, actor, near_BR | back_BR)


def probability(log_probs_BR: Tensor, batch: PolicyBatch) -> Tensor:
    """exp of log-probs as constants in [0, 1]; 1 in padding."""
    return masked_fill_zero(log_probs_BR.detach(), batch.mask_BR).clamp(max=0.0).exp()


def trust_region(batch: PolicyBatch, actor: ActorConfig, inside_BR: Tensor) -> TokenLoss:
    """-min(ratio, clip_ratio_c) * A * log_prob on the tokens inside, 0 on the others."""
    weight_BR = token_ratio(batch)
    if actor.clip_ratio_c is not None:
        weight_BR = weight_BR.clamp(max=actor.clip_ratio_c)
    return weighted_log_probs(batch, weight_BR * inside_BR, metrics_BR={"pg_clipfrac": ~inside_BR})
