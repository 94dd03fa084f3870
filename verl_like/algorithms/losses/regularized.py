"""Losses that hold the policy back by a soft term in place of a clip."""

from __future__ import annotations

import torch

from verl_like.algorithms.losses.base import PolicyBatch, TokenLoss
from verl_like.algorithms.losses.ratio import log_difference, log_ratio, weighted_log_probs
from verl_like.config import ActorConfig


def sapo(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-A * sigmoid(tau (ratio - 1)) * 4 / tau: a soft gate in place of the clip (SAPO, arXiv 2511.20347).

    tau is actor.tau_pos where A > 0, actor.tau_neg elsewhere: the larger, the faster the gradient fades.
    """
    log_ratio_BR = log_ratio(batch)
    tau_BR = torch.full_like(log_ratio_BR, actor.tau_neg).masked_fill(batch.advantages_BR > 0, actor.tau_pos)
    gate_BR = torch.sigmoid(tau_BR * (log_ratio_BR.exp() - 1)) * 4 / tau_BR
    return TokenLoss(loss_BR=-batch.advantages_BR * gate_BR, metrics_BR={})


def dro(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-(A * log_prob - beta / 2 * (log_prob - old)^2), beta = policy_loss.dro_beta (DRO, Richemond et al. 2024, arXiv
    2405.19107, by token as in verl; ROLL calls this form kimi15).

    The difference is not clamped: the penalty must not stop pulling where the policy has moved far.
    """
    penalty_BR = 0.5 * actor.policy_loss.dro_beta * log_difference(batch) ** 2
    plain = weighted_log_probs(batch)
    return TokenLoss(loss_BR=plain.loss_BR + penalty_BR, metrics_BR={})


def kimi(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-A * sum of log_probs + tau / 2 * (sum of log_prob - old)^2 of the row.

    Kimi k1.5, arXiv 2501.12599; the equation is from memory.

    tau = policy_loss.kimi_tau. The penalty is one of the whole row, spread evenly over its tokens, so that any
    loss_agg_mode can join them; seq-mean-token-sum is the published form.
    """
    row_B1 = log_difference(batch).sum(dim=1, keepdim=True)
    num_tokens_B1 = batch.mask_BR.sum(dim=1, keepdim=True).clamp(min=1)
    penalty_BR = 0.5 * actor.policy_loss.kimi_tau * (row_B1**2 / num_tokens_B1).expand_as(batch.mask_BR)
    plain = weighted_log_probs(batch)
    return TokenLoss(loss_BR=plain.loss_BR + penalty_BR, metrics_BR={})
