"""The loss functions that training engines call, put together from the menus: one for the actor, one for the critic.

They see one micro-batch and the whole mini-batch's denominators, and return sums: engines add up micro-batches and
ranks. Objects hold configuration only, so they can be pickled and called in any order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verl_like.algorithms.aggregate import AGGREGATIONS, aggregate
from verl_like.algorithms.corrections import correct, weight_of_row
from verl_like.algorithms.distillation import Distillation
from verl_like.algorithms.kl import FULL_KL_KIND, KL_ESTIMATORS, kl_penalty
from verl_like.algorithms.masked import masked_fill_zero, masked_mean, masked_sum, share_of_episode
from verl_like.algorithms.mismatch import NONFINITE, PREFIX, count_gap, gap_between
from verl_like.algorithms.policy_losses import POLICY_LOSSES, PolicyBatch, TokenLoss, log_ratio, token_ratio
from verl_like.batch import Denominators, Experience, Metric
from verl_like.config import ActorConfig, CriticConfig, DistillationConfig, RolloutCorrectionConfig
from verl_like.config.correction import corrects
from verl_like.config.menus import DEFAULT_AGGREGATION
from verl_like.flat_columns import row_sums


class PolicyObjective:
    """rl_loss_coef * (policy loss + kl_loss_coef * KL) - entropy_coeff * entropy + sft_loss_coef * imitation.

    With teachers, distillation_loss_coef * distance from them is added, or is all (use_task_rewards=False).
    Raises ValueError on an unknown loss, aggregation or KL name. The entropy is always wanted: without a coefficient it
    is a metric, which the engine's fused function computes next to the log-probs.
    """

    wants: frozenset[str] = frozenset({"log_probs", "entropy"})

    def __init__(
        self,
        actor: ActorConfig,
        correction: RolloutCorrectionConfig | None = None,
        *,
        two_policies: bool = False,
        distillation: DistillationConfig | None = None,
    ) -> None:
        """Look up the losses of the actor's configuration.

        Args:
            actor: loss, aggregation, coefficients.
            correction: algorithm.rollout_correction; None corrects nothing.
            two_policies: old log-probs are the rollout engine's (bypass mode), see algorithms/corrections.py.
            distillation: the teachers; None, or off: there are none.
        """
        self.actor = actor
        self.correction = RolloutCorrectionConfig() if correction is None else correction
        reinforce = two_policies and self.correction.loss_type == "reinforce"
        self.policy_loss = POLICY_LOSSES.lookup("policy_gradient" if reinforce else actor.policy_loss.loss_mode)
        self.weighted = reinforce or not two_policies  # PPO's ratio against the rollout engine corrects already
        own = self.policy_loss
        self.aggregation = own.aggregation or actor.loss_agg_mode or own.default_aggregation
        self.side_aggregation = actor.loss_agg_mode or DEFAULT_AGGREGATION  # of the entropy, KL and sft terms
        AGGREGATIONS.lookup(self.aggregation)
        AGGREGATIONS.lookup(self.side_aggregation)
        if actor.use_kl_loss and actor.kl_loss_type == FULL_KL_KIND:
            self.wants = self.wants | {"full_kl"}
        elif actor.use_kl_loss:
            KL_ESTIMATORS.lookup(actor.kl_loss_type)
        self.distillation = None
        if distillation is not None and distillation.enabled:
            self.distillation = Distillation(actor, distillation.distillation_loss)
        self.alone = distillation is not None and distillation.alone
        if self.distillation is not None:
            self.wants = self.wants | self.distillation.wants

    def without_gradient(self, experience: Experience) -> Tensor | None:
        """Rows that no term of this objective can learn from, because all their advantages are 0: bool [B].

        None where another term always has a gradient (entropy, KL, imitation, teachers, or one of the loss's own).
        """
        actor = self.actor
        by_score = actor.policy_loss.loss_mode == "topr" and actor.policy_loss.topr.reward_source == "score"
        others = actor.entropy_coeff != 0 or actor.use_kl_loss or actor.sft_loss_coef != 0 or by_score
        if others or self.policy_loss.pulls_without_advantage or self.distillation is not None:
            return None
        pulls_T = masked_fill_zero(experience.advantages_T, experience.response_mask_T) != 0
        return row_sums(pulls_T, experience.response_length_B) == 0

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The micro-batch's share of the loss, and of the metrics."""
        batch = policy_batch(outputs["log_probs"], experience)
        kept_BR, sums = self._kept_tokens(batch, experience, denominators)
        token_loss = self.policy_loss.function(batch, self.actor)
        sums |= token_means(token_loss, batch.mask_BR, denominators)
        if "selected_frac" in sums:
            sums["selected_tokens"] = sums["selected_frac"] * denominators.num_tokens
        sums["ppo_kl"] = masked_sum(-log_ratio(batch).detach(), batch.mask_BR) / max(denominators.num_tokens, 1)
        factor_BR, mismatch, maxima = self._correction(batch.log_probs_BR, experience)
        loss_BR = token_loss.loss_BR if factor_BR is None else token_loss.loss_BR * factor_BR
        if experience.sample_weight_B is not None:  # the driver normalised them
            loss_BR = loss_BR * experience.sample_weight_B.to(loss_BR.dtype)[:, None]
        loss = sums["pg_loss"] = self._aggregate(loss_BR, kept_BR, experience, denominators, self.aggregation)
        if self.actor.use_kl_loss:
            exact = self.actor.kl_loss_type == FULL_KL_KIND
            kl_BR = outputs["full_kl"] if exact else self._kl(batch, experience)
            sums["kl_loss"] = self._aggregate(kl_BR, kept_BR, experience, denominators)
            loss = loss + self.actor.kl_loss_coef * sums["kl_loss"]
        loss = self.actor.rl_loss_coef * loss
        entropy_BR = outputs["entropy"]
        sums["entropy"] = masked_sum(entropy_BR.detach(), batch.mask_BR) / max(denominators.num_tokens, 1)
        if self.actor.entropy_coeff != 0:
            loss = loss - self.actor.entropy_coeff * self._aggregate(entropy_BR, kept_BR, experience, denominators)
        if self.actor.sft_loss_coef != 0:
            sums["sft_loss"] = self._imitation(batch, kept_BR, experience, denominators)
            loss = loss + self.actor.sft_loss_coef * sums["sft_loss"]
        minima: dict[str, Tensor] = {}
        if self.distillation is not None:
            taught, extremes = self.distillation(outputs, batch, experience)
            weigh = factor_BR is not None and self.distillation.loss.use_policy_gradient
            taught_BR = taught.loss_BR * factor_BR if weigh else taught.loss_BR
            distance = self._aggregate(taught_BR, kept_BR, experience, denominators)
            loss = self.distillation.coefficient * distance + (0.0 if self.alone else loss)
            sums["distillation/loss"] = distance
            for name, value in token_means(taught, batch.mask_BR, denominators).items():
                sums[f"distillation/{name}"] = value
            for name, value_BR in extremes.items():
                maxima[f"distillation/{name}_max"] = value_BR.masked_fill(~batch.mask_BR, -math.inf).max()
                minima[f"distillation/{name}_min"] = value_BR.masked_fill(~batch.mask_BR, math.inf).min()
        return loss, as_metrics(sums | mismatch, maxima, minima)

    def _correction(
        self, log_probs_BR: Tensor, experience: Experience
    ) -> tuple[Tensor | None, dict[str, Tensor], dict[str, Tensor]]:
        """Factors of the policy loss [B, R] (None: 1), and the mismatch as (sums, maxima) for `mismatch.finish`.

        The driver's weights where it made them; else the weights and rejections of this update, as zeros and weights,
        so that a rejected token stays in the denominators.
        """
        weights_BR, rollout_BR = experience.rollout_is_weights_BR, experience.rollout_log_probs_BR
        if weights_BR is not None and self.policy_loss.one_weight_per_row:
            weights_BR = weight_of_row(weights_BR, experience.response_mask_BR)
        if rollout_BR is None:
            return weights_BR, {}, {}
        shares_B = share_of_episode(experience.response_mask_BR, experience.episode_tokens_B)
        gap = gap_between(log_probs_BR, rollout_BR, experience.response_mask_BR, shares_B)
        tally = count_gap(gap)
        if weights_BR is None and corrects(self.correction):
            found = correct(gap, self.correction, weighted=self.weighted)
            weights_BR = found.keep_BR.to(log_probs_BR.dtype)
            if found.weights_BR is not None:
                per_row = self.policy_loss.one_weight_per_row
                given_BR = weight_of_row(found.weights_BR, found.keep_BR) if per_row else found.weights_BR
                weights_BR = weights_BR * given_BR.to(log_probs_BR.dtype)
            tally = tally.joined(found.tally)
        sums = {PREFIX + name: value for name, value in tally.sums.items()}
        maxima = {PREFIX + name: value for name, value in tally.maxima.items()}
        return weights_BR, sums | {NONFINITE: gap.unknown_BR.sum()}, maxima

    def _aggregate(
        self, loss_BR: Tensor, mask_BR: Tensor, experience: Experience, denominators: Denominators, mode: str = ""
    ) -> Tensor:
        """Aggregate a loss per token by `mode`; the default is the mode of all terms but the policy loss."""
        scale, tokens_B = self.actor.loss_scale_factor, experience.episode_tokens_B
        return aggregate(loss_BR, mask_BR, mode or self.side_aggregation, denominators, scale, tokens_B)

    def _kept_tokens(
        self, batch: PolicyBatch, experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mask without rows whose mean ratio is above ratio_skip_threshold; they stay in the denominators.

        Known only after the forward pass, so no denominator can leave them out without depending on the micro-batches.
        skip_ratio counts an episode once: by the share of its tokens that stand in such rows.
        """
        if self.actor.ratio_skip_threshold is None:
            return batch.mask_BR, {}
        mean_ratio_B = masked_mean(token_ratio(batch).detach(), batch.mask_BR, dim=1)
        skipped_B = mean_ratio_B > self.actor.ratio_skip_threshold
        shares_B = share_of_episode(batch.mask_BR, experience.episode_tokens_B).float()
        skip_ratio = (skipped_B * shares_B).sum() / max(denominators.num_sequences, 1)
        return batch.mask_BR & ~skipped_B[:, None], {"skip_ratio": skip_ratio}

    def _kl(self, batch: PolicyBatch, experience: Experience) -> Tensor:
        """KL to the reference per token; use_unbiased_kl carries it over from the policy that sampled by the ratio."""
        if experience.ref_log_probs_BR is None:
            raise ValueError(
                "actor_rollout_ref.actor.use_kl_loss=True needs reference log-probs, but the batch has none"
            )
        # Filled first: a NaN in padding would come back through the gradient of a masked product.
        current_BR = masked_fill_zero(batch.log_probs_BR, batch.mask_BR)
        reference_BR = masked_fill_zero(experience.ref_log_probs_BR, batch.mask_BR)
        kl_BR = kl_penalty(current_BR, reference_BR, self.actor.kl_loss_type)
        return kl_BR * token_ratio(batch) if self.actor.use_unbiased_kl else kl_BR

    def _imitation(
        self, batch: PolicyBatch, kept_BR: Tensor, experience: Experience, denominators: Denominators
    ) -> Tensor:
        """-log_prob of rows with a score above 0; the others add 0 and stay in the denominators."""
        if batch.score_B is None:
            raise ValueError(
                "actor_rollout_ref.actor.sft_loss_coef needs the scores of the rows, but the batch has none"
            )
        good_BR = kept_BR & (batch.score_B > 0)[:, None]
        return self._aggregate(-batch.log_probs_BR, good_BR, experience, denominators)


def policy_batch(log_probs_BR: Tensor, experience: Experience) -> PolicyBatch:
    """Select the columns that a policy loss sees.

    Without old log-probs the update's own, detached, take their place: ratios are 1.
    """
    old_BR = experience.old_log_probs_BR
    return PolicyBatch(
        log_probs_BR=log_probs_BR,
        old_log_probs_BR=log_probs_BR.detach() if old_BR is None else old_BR,
        advantages_BR=experience.advantages_BR,
        mask_BR=experience.response_mask_BR,
        selected_BR=experience.selected_BR,
        score_B=experience.score_B,
    )


class ValueObjective:
    """Clipped squared error of the critic's predictions against the returns."""

    wants = frozenset({"values"})

    def __init__(self, critic: CriticConfig) -> None:
        self.critic = critic
        self.aggregation = critic.loss_agg_mode or DEFAULT_AGGREGATION
        AGGREGATIONS.lookup(self.aggregation)

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
        tokens_B = experience.episode_tokens_B
        loss = aggregate(token_loss.loss_BR, mask_BR, self.aggregation, denominators, episode_tokens_B=tokens_B)
        return loss, as_metrics({"vf_loss": loss, **token_means(token_loss, mask_BR, denominators)})


def token_means(token_loss: TokenLoss, mask_BR: Tensor, denominators: Denominators) -> dict[str, Tensor]:
    """Share of this micro-batch in each metric's mean over the mini-batch's tokens."""
    count = max(denominators.num_tokens, 1)
    return {name: masked_sum(value.float(), mask_BR) / count for name, value in token_loss.metrics_BR.items()}


def as_metrics(
    sums: dict[str, Tensor], maxima: dict[str, Tensor] | None = None, minima: dict[str, Tensor] | None = None
) -> dict[str, Metric]:
    """Convert scalars on a device to metrics, in one transfer. An extreme over nothing is left out."""
    maxima, minima = maxima or {}, minima or {}
    scalars = [value.detach().double() for value in [*sums.values(), *maxima.values(), *minima.values()]]
    numbers = torch.stack(scalars).tolist()
    reductions = ["sum"] * len(sums) + ["max"] * len(maxima) + ["min"] * len(minima)
    named = zip([*sums, *maxima, *minima], numbers, reductions, strict=True)
    empty = {"max": -math.inf, "min": math.inf}
    return {name: Metric(value=v, reduction=r) for name, v, r in named if v != empty.get(r)}


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float) -> TokenLoss:
    """0.5 * max((v - R)^2, (clip(v, v_old +- cliprange_value) - R)^2) for each token (PPO's value clipping).

    vf_clipfrac: share of tokens where the clipped term is the larger one (no gradient); vpred_mean: mean prediction.
    """
    clipped = torch.minimum(torch.maximum(values, old_values - cliprange_value), old_values + cliprange_value)
    plain_error, clipped_error = (values - returns) ** 2, (clipped - returns) ** 2
    return TokenLoss(
        loss_BR=0.5 * torch.maximum(plain_error, clipped_error),
        metrics_BR={"vf_clipfrac": clipped_error > plain_error, "vpred_mean": values},
    )
