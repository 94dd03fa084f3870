"""The loss functions that training engines call, put together from the menus: one for the actor, one for the critic.

They see one micro-batch and the whole mini-batch's denominators, and return sums: engines add up micro-batches and
ranks. Objects hold configuration only, so they can be pickled and called in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.algorithms.aggregate import AGGREGATIONS, aggregate
from verl_like.algorithms.kl import KL_ESTIMATORS, kl_penalty
from verl_like.algorithms.masked import masked_fill_zero, masked_sum
from verl_like.algorithms.policy_losses import POLICY_LOSSES, PolicyBatch, TokenLoss
from verl_like.algorithms.value_losses import clipped_value_loss
from verl_like.batch import Denominators, Experience, Metric
from verl_like.config import ActorConfig, CriticConfig


class PolicyObjective:
    """Policy loss - entropy_coeff * entropy + kl_loss_coef * KL to the reference.

    Raises ValueError on an unknown loss, aggregation or KL name. The entropy is always wanted: without a coefficient it
    is a metric, which the engine's fused function computes next to the log-probs.
    """

    wants = frozenset({"log_probs", "entropy"})

    def __init__(self, actor: ActorConfig) -> None:
        self.actor = actor
        self.policy_loss = POLICY_LOSSES.lookup(actor.policy_loss.loss_mode)
        self.aggregation = self.policy_loss.aggregation or actor.loss_agg_mode
        AGGREGATIONS.lookup(self.aggregation)
        AGGREGATIONS.lookup(actor.loss_agg_mode)
        if actor.use_kl_loss:
            KL_ESTIMATORS.lookup(actor.kl_loss_type)

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The micro-batch's share of the loss, and of the metrics."""
        log_probs_BR, mask_BR = outputs["log_probs"], experience.response_mask_BR
        old_BR = experience.old_log_probs_BR
        batch = PolicyBatch(
            log_probs_BR=log_probs_BR,
            old_log_probs_BR=log_probs_BR.detach() if old_BR is None else old_BR,
            advantages_BR=experience.advantages_BR,
            mask_BR=mask_BR,
        )
        token_loss = self.policy_loss.function(batch, self.actor)
        loss = pg_loss = self._aggregate(token_loss.loss_BR, mask_BR, self.aggregation, denominators)
        sums = {"pg_loss": pg_loss, **token_means(token_loss, mask_BR, denominators)}
        entropy_BR = outputs["entropy"]
        if self.actor.entropy_coeff != 0:
            entropy_loss = self._aggregate(entropy_BR, mask_BR, self.actor.loss_agg_mode, denominators)
            loss = loss - self.actor.entropy_coeff * entropy_loss
        sums["entropy"] = masked_sum(entropy_BR.detach(), mask_BR) / max(denominators.num_tokens, 1)
        if self.actor.use_kl_loss:
            kl_loss = self._kl_loss(log_probs_BR, experience, denominators)
            loss = loss + self.actor.kl_loss_coef * kl_loss
            sums["kl_loss"] = kl_loss
        differences, maxima = rollout_difference(batch, experience.rollout_log_probs_BR, denominators)
        return loss, as_metrics({**sums, **differences}, maxima)

    def _aggregate(self, loss_BR: Tensor, mask_BR: Tensor, mode: str, denominators: Denominators) -> Tensor:
        return aggregate(loss_BR, mask_BR, mode, denominators, self.actor.loss_scale_factor)

    def _kl_loss(self, log_probs_BR: Tensor, experience: Experience, denominators: Denominators) -> Tensor:
        if experience.ref_log_probs_BR is None:
            raise ValueError(
                "actor_rollout_ref.actor.use_kl_loss=True needs reference log-probs, but the batch has none"
            )
        mask_BR = experience.response_mask_BR
        # Filled first: a NaN in padding would come back through the gradient of a masked product.
        current_BR = masked_fill_zero(log_probs_BR, mask_BR)
        reference_BR = masked_fill_zero(experience.ref_log_probs_BR, mask_BR)
        kl_BR = kl_penalty(current_BR, reference_BR, self.actor.kl_loss_type)
        return self._aggregate(kl_BR, mask_BR, self.actor.loss_agg_mode, denominators)


class ValueObjective:
    """Clipped squared error of the critic's predictions against the returns."""

    wants = frozenset({"values"})

    def __init__(self, critic: CriticConfig) -> None:
        self.critic = critic
        AGGREGATIONS.lookup(critic.loss_agg_mode)

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The micro-batch's share of the loss, and of the metrics."""
        if experience.values_BR is None or experience.returns_BR is None:
            raise ValueError("the critic's update needs values and returns, but the batch has none")
        mask_BR = experience.response_mask_BR
        token_loss = clipped_value_loss(
            masked_fill_zero(outputs["values"], mask_BR),
            masked_fill_zero(experience.values_BR, mask_BR),
            masked_fill_zero(experience.returns_BR, mask_BR),
            self.critic.cliprange_value,
        )
        loss = aggregate(token_loss.loss_BR, mask_BR, self.critic.loss_agg_mode, denominators)
        return loss, as_metrics({"vf_loss": loss, **token_means(token_loss, mask_BR, denominators)})


def token_means(token_loss: TokenLoss, mask_BR: Tensor, denominators: Denominators) -> dict[str, Tensor]:
    """This micro-batch's share of each metric's mean over the mini-batch's tokens."""
    count = max(denominators.num_tokens, 1)
    return {name: masked_sum(value.float(), mask_BR) / count for name, value in token_loss.metrics_BR.items()}


def rollout_difference(
    batch: PolicyBatch, rollout_log_probs_BR: Tensor | None, denominators: Denominators
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """|p_trainer - p_rollout| of the sampled tokens as (sums, maxima): above 0.005 on average the two engines disagree.

    Tokens whose rollout log-prob is not finite are counted in training/rollout_log_probs_nonfinite and left out.
    """
    if rollout_log_probs_BR is None:
        return {}, {}
    finite_BR = batch.mask_BR & rollout_log_probs_BR.isfinite()
    gap_BR = (batch.old_log_probs_BR.exp() - rollout_log_probs_BR.exp()).abs()
    gap_BR = masked_fill_zero(gap_BR, finite_BR)
    largest = gap_BR.max() if gap_BR.numel() else gap_BR.sum()
    sums = {
        "training/rollout_probs_diff_mean": gap_BR.sum() / max(denominators.num_tokens, 1),
        "training/rollout_log_probs_nonfinite": (batch.mask_BR & ~finite_BR).sum(),
    }
    return sums, {"training/rollout_probs_diff_max": largest}


def as_metrics(sums: dict[str, Tensor], maxima: dict[str, Tensor] | None = None) -> dict[str, Metric]:
    """Scalars on a device as metrics, fetched in one transfer."""
    maxima = maxima or {}
    scalars = [value.detach().float() for value in [*sums.values(), *maxima.values()]]
    numbers = torch.stack(scalars).tolist()
    reductions = ["sum"] * len(sums) + ["max"] * len(maxima)
    names = [*sums, *maxima]
    return {name: Metric(value=v, reduction=r) for name, v, r in zip(names, numbers, reductions, strict=True)}
