"""Policy losses: what each sampled token contributes. One function each, chosen by actor.policy_loss.loss_mode.

To add one: write `f(batch, actor) -> TokenLoss` under `@register_policy_loss("name")`, test it, and give it a section
in docs/algorithms.md (a test asks for it). A loss that prescribes how tokens are joined says so when it registers
(`aggregation="seq-mean-token-mean"`); otherwise actor.loss_agg_mode decides. Ratio, clamp and clip metrics have one
implementation each, below: reuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_like.algorithms.masked import masked_fill_zero, masked_mean
from verl_like.algorithms.registry import Registry
from verl_like.config import ActorConfig

LOG_RATIO_LIMIT = 20.0  # a token whose probability changed by more gives no gradient, and exp() cannot overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBatch:
    """One micro-batch as losses see it. Only `log_probs_BR` has a graph."""

    log_probs_BR: Tensor  # of the policy being trained
    old_log_probs_BR: Tensor  # of the policy the ratio is taken against
    advantages_BR: Tensor
    mask_BR: Tensor  # bool: tokens the policy sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A loss per token, and what to report: the mean over the mini-batch's tokens of each metric."""

    loss_BR: Tensor
    metrics_BR: dict[str, Tensor]


PolicyLossFunction = Callable[[PolicyBatch, ActorConfig], TokenLoss]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """An entry of the menu: the function, and the aggregation it prescribes (None: the user's choice)."""

    function: PolicyLossFunction
    aggregation: str | None = None


POLICY_LOSSES: Registry[PolicyLoss] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")


def register_policy_loss(
    name: str, *, aggregation: str | None = None
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Decorator: put a loss on the menu."""

    def add(function: PolicyLossFunction) -> PolicyLossFunction:
        POLICY_LOSSES.register(name)(PolicyLoss(function=function, aggregation=aggregation))
        return function

    return add


def log_difference(batch: PolicyBatch) -> Tensor:
    """log_prob - old_log_prob; 0 outside the mask, so that padding cannot spread NaN."""
    return masked_fill_zero(batch.log_probs_BR - batch.old_log_probs_BR, batch.mask_BR)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, with the logarithm clamped to +-20: it cannot overflow."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def log_ratio(batch: PolicyBatch) -> Tensor:
    """log_prob - old_log_prob, clamped to +-20; 0 outside the mask, so padding can neither overflow nor spread NaN."""
    return log_difference(batch).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clip_range(actor: ActorConfig) -> tuple[float, float]:
    """How far below and above 1 the ratio may go: clip_ratio_low and _high, clip_ratio where they are null."""
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    return low, high


def clipped_surrogate(
    ratio_BR: Tensor, advantages_BR: Tensor, actor: ActorConfig, *, dual_clip: bool = True
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


@register_policy_loss("vanilla")
def vanilla(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """PPO clip (Schulman et al. 2017, arXiv 1707.06347), asymmetric as in DAPO (2503.14476), dual clip (1912.09729).

    ppo_kl is the mean of old - new log-probs: how far the policy has moved from the one the ratio is taken against.
    """
    log_ratio_BR = log_ratio(batch)
    surrogate = clipped_surrogate(log_ratio_BR.exp(), batch.advantages_BR, actor)
    return TokenLoss(loss_BR=surrogate.loss_BR, metrics_BR={"ppo_kl": -log_ratio_BR, **surrogate.metrics_BR})


@register_policy_loss("policy_gradient")
@register_policy_loss("gpg")
def policy_gradient(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-A * log_prob: no ratio, no clip (Williams 1992; GPG, arXiv 2504.02546). For one update per rollout batch."""
    return weighted_log_probs(batch, torch.ones_like(batch.advantages_BR), {})


def weighted_log_probs(batch: PolicyBatch, weight_BR: Tensor, metrics_BR: dict[str, Tensor]) -> TokenLoss:
    """-weight * A * log_prob, with the weight taken as a constant."""
    log_probs_BR = masked_fill_zero(batch.log_probs_BR, batch.mask_BR)
    loss_BR = -weight_BR.detach() * batch.advantages_BR * log_probs_BR
    return TokenLoss(loss_BR=loss_BR, metrics_BR={"ppo_kl": -log_ratio(batch).detach(), **metrics_BR})


@register_policy_loss("cispo")
def cispo(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-clip(ratio) * A * log_prob, the clipped ratio a constant (CISPO, MiniMax-M1, arXiv 2506.13585).

    No token loses its gradient. pg_clipfrac: share of tokens whose weight a bound changed.
    """
    low, high = clip_range(actor)
    ratio_BR = log_ratio(batch).exp()
    weight_BR = ratio_BR.clamp(1 - low, 1 + high)
    return weighted_log_probs(batch, weight_BR, {"pg_clipfrac": weight_BR != ratio_BR})


@register_policy_loss("sapo", aggregation="seq-mean-token-mean")
def sapo(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-A * sigmoid(tau (ratio - 1)) * 4 / tau: a soft gate in place of the clip (SAPO, arXiv 2511.20347).

    tau is actor.tau_pos where A > 0, actor.tau_neg elsewhere: the larger, the faster the gradient fades.
    """
    log_ratio_BR = log_ratio(batch)
    tau_BR = torch.full_like(log_ratio_BR, actor.tau_neg).masked_fill(batch.advantages_BR > 0, actor.tau_pos)
    gate_BR = torch.sigmoid(tau_BR * (log_ratio_BR.exp() - 1)) * 4 / tau_BR
    return TokenLoss(loss_BR=-batch.advantages_BR * gate_BR, metrics_BR={"ppo_kl": -log_ratio_BR})


@register_policy_loss("dro")
def dro(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-(A * log_prob - beta / 2 * (log_prob - old)^2), beta = policy_loss.dro_beta (DRO, arXiv 2405.19107).

    The difference is not clamped: the penalty must not stop pulling where the policy has moved far.
    """
    plain = weighted_log_probs(batch, torch.ones_like(batch.advantages_BR), {})
    penalty_BR = 0.5 * actor.policy_loss.dro_beta * log_difference(batch) ** 2
    return TokenLoss(loss_BR=plain.loss_BR + penalty_BR, metrics_BR=plain.metrics_BR)


@register_policy_loss("gspo", aggregation="seq-mean-token-mean")
def gspo(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """PPO clip on one ratio per row, exp(mean over its tokens of log_prob - old) (GSPO, arXiv 2507.18071).

    No dual clip. Where all tokens of a row have one advantage, each row is clipped or kept as a whole.
    """
    difference_BR = log_difference(batch)
    ratio_B1 = bounded_exp(masked_mean(difference_BR, batch.mask_BR, dim=1))[:, None]
    return sequence_surrogate(ratio_B1, batch, actor)


@register_policy_loss("gspo_token", aggregation="seq-mean-token-mean")
def gspo_token(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """GSPO's ratio as value, each token's own log-prob as gradient (GSPO-token, arXiv 2507.18071, section 4.3).

    The same gradient as gspo where a row has one advantage; verl calls this form gspo. With token advantages (gae),
    credit stays on its token.
    """
    difference_BR = log_difference(batch)
    mean_B1 = masked_mean(difference_BR.detach(), batch.mask_BR, dim=1)[:, None]
    return sequence_surrogate(bounded_exp(difference_BR - difference_BR.detach() + mean_B1), batch, actor)


def sequence_surrogate(ratio: Tensor, batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """The clipped surrogate of a ratio that all tokens of a row share: [B, 1], or [B, R]."""
    # Filled first: a NaN in padding would reach the row's other tokens through the shared ratio.
    advantages_BR = masked_fill_zero(batch.advantages_BR, batch.mask_BR)
    surrogate = clipped_surrogate(ratio, advantages_BR, actor, dual_clip=False)
    metrics = {"ppo_kl": -log_ratio(batch), **surrogate.metrics_BR}
    return TokenLoss(loss_BR=surrogate.loss_BR, metrics_BR=metrics)


@register_policy_loss("geo_mean", aggregation="seq-mean-token-mean")
def geo_mean(batch: PolicyBatch, actor: ActorConfig) -> TokenLoss:
    """-A * geometric mean of the row's ratios, each clipped in log space (GMPO, Zhao et al. 2025, arXiv 2507.20673).

    log ratios are bounded to [-low, high] on the side that A rewards; A is the row's mean advantage. Every row counts
    once in the mini-batch, whatever the micro-batches (verl takes each micro-batch's mean).
    """
    low, high = clip_range(actor)
    difference_BR = log_difference(batch)
    advantages_BR = masked_fill_zero(batch.advantages_BR, batch.mask_BR)
    clamped_BR = difference_BR.clamp(-low, high)
    sign_BR = advantages_BR.sign()
    chosen_BR = sign_BR * torch.minimum(sign_BR * difference_BR, sign_BR * clamped_BR)
    ratio_B = bounded_exp(masked_mean(chosen_BR, batch.mask_BR, dim=1))
    loss_B = -masked_mean(advantages_BR, batch.mask_BR, dim=1) * ratio_B
    clipped_BR = sign_BR * clamped_BR < sign_BR * difference_BR
    metrics = {"ppo_kl": -log_ratio(batch), "pg_clipfrac": clipped_BR}
    return TokenLoss(loss_BR=loss_B[:, None].expand_as(batch.mask_BR), metrics_BR=metrics)
