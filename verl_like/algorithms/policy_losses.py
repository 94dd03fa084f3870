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

from verl_like.algorithms.masked import masked_fill_zero
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


def log_ratio(batch: PolicyBatch) -> Tensor:
    """log_prob - old_log_prob, clamped to +-20; 0 outside the mask, so padding can neither overflow nor spread NaN."""
    difference_BR = masked_fill_zero(batch.log_probs_BR - batch.old_log_probs_BR, batch.mask_BR)
    return difference_BR.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clip_range(actor: ActorConfig) -> tuple[float, float]:
    """How far below and above 1 the ratio may go: clip_ratio_low and _high, clip_ratio where they are null."""
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    return low, high


def clipped_surrogate(ratio_BR: Tensor, advantages_BR: Tensor, actor: ActorConfig) -> TokenLoss:
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
    if actor.clip_ratio_c is not None:
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
