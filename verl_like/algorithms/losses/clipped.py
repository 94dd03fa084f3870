"""Losses that bound a probability ratio by PPO's clip: of a token, of a row, and with chosen tokens set apart."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.algorithms.losses.base import PolicyBatch, TokenLoss
from verl_like.algorithms.losses.ratio import (
    bounded_exp,
    clip_range,
    clipped_surrogate,
    filled_advantages,
    log_difference,
    sequence_ratio,
    token_ratio,
)
from verl_like.algorithms.masked import masked_mean
from verl_like.config import ActorConfig


def vanilla(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """PPO clip (Schulman et al. 2017, arXiv 1707.06347), asymmetric as in DAPO (2503.14476), dual clip (1912.09729)."""
    return clipped_surrogate(token_ratio(batch), batch.advantages_BR, actor, dual_clip=True)


def gspo(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """PPO clip on one ratio per row, exp(mean over its tokens of log_prob - old) (GSPO, arXiv 2507.18071).

    No dual clip. Where all tokens of a row have one advantage, each row is clipped or kept as a whole. Joined as
    published unless actor.loss_agg_mode is set.
    """
    return clipped_surrogate(sequence_ratio(batch), filled_advantages(batch), actor)


def luspo(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """GSPO with each row's loss times its length (LUSPO, Liu et al. 2026, arXiv 2602.05261): no bias to short rows.

    The sum over a row's tokens, each with the row's ratio, is T times their mean.
    """
    return clipped_surrogate(sequence_ratio(batch), filled_advantages(batch), actor)


def gspo_token(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """GSPO's ratio as value, each token's own log-prob as gradient (GSPO-token, arXiv 2507.18071, section 4.3).

    The same gradient as gspo where all tokens of a row have one advantage and one importance weight; verl calls this
    form gspo. With token advantages (gae) or token weights (rollout_is=token), each acts on its own token.
    """
    difference_BR = log_difference(batch)
    mean_B1 = masked_mean(difference_BR.detach(), batch.mask_BR, dim=1)[:, None]
    ratio_BR = bounded_exp(difference_BR - difference_BR.detach() + mean_B1)
    return clipped_surrogate(ratio_BR, filled_advantages(batch), actor)


def geo_mean(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-A * geometric mean of the row's ratios, each clipped in log space (GMPO, Zhao et al. 2025, arXiv 2507.20673).

    log ratios are bounded to [-low, high] on the side that A rewards; A is the row's mean advantage. Every row counts
    once in the mini-batch, whatever the micro-batches (verl takes each micro-batch's mean). pg_clipfrac: share of
    tokens with A > 0 that the upper bound cut; pg_clipfrac_lower: with A < 0, the lower bound.
    """
    low, high = clip_range(actor)
    difference_BR = log_difference(batch)
    advantages_BR = filled_advantages(batch)
    clamped_BR = difference_BR.clamp(-low, high)
    sign_BR = advantages_BR.sign()
    chosen_BR = sign_BR * torch.minimum(sign_BR * difference_BR, sign_BR * clamped_BR)
    ratio_B = bounded_exp(masked_mean(chosen_BR, batch.mask_BR, dim=1))
    loss_B = -masked_mean(advantages_BR, batch.mask_BR, dim=1) * ratio_B
    metrics = {
        "pg_clipfrac": (advantages_BR > 0) & (difference_BR > high),
        "pg_clipfrac_lower": (advantages_BR < 0) & (difference_BR < -low),
    }
    return TokenLoss(loss_BR=loss_B[:, None].expand_as(batch.mask_BR), metrics_BR=metrics)


def clip_cov(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """PPO clip without dual clip; the selected tokens get no loss (Clip-Cov, Cui et al. 2025, arXiv 2505.22617).

    Selected over the mini-batch by algorithms/preparation.py: few random tokens of large covariance of log-prob and
    advantage, those that make the entropy collapse. A token that the clip cut off by now is no candidate: it keeps its
    loss, and counts as clipped.
    """
    surrogate = clipped_surrogate(token_ratio(batch), batch.advantages_BR, actor)
    selected_BR = chosen_tokens(batch) & ~surrogate.metrics_BR["pg_clipfrac"]
    loss_BR = surrogate.loss_BR.masked_fill(selected_BR, 0.0)
    return TokenLoss(loss_BR=loss_BR, metrics_BR=surrogate.metrics_BR | {"selected_frac": selected_BR})


def kl_cov(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-A * ratio, unclipped; the selected tokens also pay ppo_kl_coef * |log_prob - old| (KL-Cov, arXiv 2505.22617).

    Selected: the tokens with the largest covariance of log-prob and advantage in the mini-batch.
    """
    selected_BR = chosen_tokens(batch)
    penalty_BR = actor.policy_loss.ppo_kl_coef * log_difference(batch).abs() * selected_BR
    loss_BR = -batch.advantages_BR * token_ratio(batch) + penalty_BR
    return TokenLoss(loss_BR=loss_BR, metrics_BR={"selected_frac": selected_BR})


def chosen_tokens(batch: PolicyBatch) -> Tensor:
    """Return the tokens that the driver selected. Raises ValueError where it selected none."""
    if batch.selected_BR is None:
        raise ValueError("clip_cov and kl_cov need tokens selected over the mini-batch, but the batch has no selection")
    return batch.selected_BR
