"""Importance weights and rejections against the mismatch of trainer and rollout engine (algorithm.rollout_correction).

Three policies: the rollout engine's sampled the tokens, the old one is the trainer's before the update, the current one
is trained. PPO's ratio is current / old; the weights here, old / rollout, are constants that multiply the policy loss.
With two policies (bypass mode) old is the rollout engine's, and the weights, if any, are current / rollout.

Where the old log-probs are on the driver, so are the weights and rejections, over the whole batch: rejected tokens
leave response_mask before anything is counted. Otherwise the update computes them for its micro-batch, and what it
rejects keeps its place in the denominators.

Weights and rejections of a "sequence" are those of one row, also where an episode has several: a row's tokens were
sampled in one context, and the product of ratios over a history that was rewritten is the ratio of no distribution that
anybody sampled from. Metrics and rollout_is_batch_normalize count the episode once.

Sources: TIS, Yao et al. 2025 (fengyao.notion.site/off-policy-rl); IcePop, Ring-1T, arXiv 2510.18855; Liu et al. 2025
(richardli.xyz/rl-collapse); ROLL's train_infer_correction.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_like.algorithms.masked import masked_fill_zero, masked_mean, masked_sum
from verl_like.algorithms.mismatch import (
    LOG_LIMIT,
    NONFINITE,
    Gap,
    Tally,
    count_gap,
    count_rows,
    finish,
    gap_between,
    largest,
)
from verl_like.batch import Episodes, Evaluated, Rollouts
from verl_like.config import ActorConfig, RolloutCorrectionConfig
from verl_like.config.batch_plan import uses_sampler_log_probs
from verl_like.config.correction import Bounds, Rejection, corrects, parse_rejections, weight_bounds
from verl_like.flat_columns import Blocks, row_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Importance weights and rejections of a batch, with the sums behind their metrics."""

    weights_BR: Tensor | None  # float64, 0 outside the mask; None: no importance weights
    keep_BR: Tensor  # bool: sampled tokens that were not rejected
    tally: Tally  # sums for the metrics, see mismatch.finish
    norm_factor: float | None = None  # what the weights were divided by (rollout_is_batch_normalize)


def correct(gap: Gap, correction: RolloutCorrectionConfig, *, weighted: bool = True) -> Correction:
    """Compute weights and rejections of these rows. `weighted=False` leaves the weights out, whatever rollout_is says.

    A token whose rollout log-prob is unknown cannot be corrected: it is rejected, and its whole row with it where a
    weight or a rejection is one of the row. Everything is computed in float64 with log ratios clamped to +-20.
    """
    level = correction.rollout_is if weighted else None
    rejections = parse_rejections(correction.rollout_rs, correction.rollout_rs_threshold)
    veto = correction.rollout_token_veto_threshold
    by_row = level not in (None, "token") or veto is not None or any(r.level != "token" for r in rejections)
    known_BR = gap.mask_BR & ~gap.unknown_BR.any(dim=1, keepdim=True) if by_row else gap.mask_BR
    keep_BR, tally = reject(gap, known_BR, rejections, veto)
    if level is None:
        return Correction(weights_BR=None, keep_BR=keep_BR, tally=tally)
    raw_BR = importance_weights(gap.log_ratio_BR, gap.mask_BR, level)
    bounds = weight_bounds(correction.rollout_is_threshold)
    weights_BR = bounded(raw_BR, bounds)
    tally = tally.joined(count_weights(raw_BR, weights_BR, gap, bounds, level))
    factor = None
    if correction.rollout_is_batch_normalize:
        factor = mean_weight(weights_BR, gap, level).item() or 1.0
        weights_BR = weights_BR / factor
    return Correction(weights_BR=weights_BR, keep_BR=keep_BR, tally=tally, norm_factor=factor)


# ---- weights


def importance_weights(log_ratio_BR: Tensor, mask_BR: Tensor, level: str) -> Tensor:
    """p / q of each token [B, R], 0 outside the mask, by rollout_is.

    token: its own ratio. sequence: the product over the row. geometric: the row's geometric mean. segment: the
    geometric mean over the token's own turn, a run of sampled tokens between tool text (ROLL).
    """
    if level == "sequence":
        joined_BR = masked_sum(log_ratio_BR, mask_BR, dim=1)[:, None]
    elif level == "geometric":
        joined_BR = masked_mean(log_ratio_BR, mask_BR, dim=1)[:, None]
    elif level == "segment":
        joined_BR = segment_mean(log_ratio_BR, mask_BR)
    else:
        joined_BR = log_ratio_BR
    ratio_BR = joined_BR.clamp(-LOG_LIMIT, LOG_LIMIT).exp().expand_as(log_ratio_BR)
    return masked_fill_zero(ratio_BR, mask_BR)


def segment_mean(values_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Mean over each run of true entries, written on all of its entries; 0 elsewhere."""
    starts_BR = mask_BR & ~torch.nn.functional.pad(mask_BR, (1, 0))[:, :-1]
    rows, width = mask_BR.shape
    segment_BR = starts_BR.cumsum(dim=1) + (width + 1) * torch.arange(rows, device=mask_BR.device)[:, None]
    segment, size = segment_BR.flatten(), rows * (width + 1)
    zeros = values_BR.new_zeros(size)
    total = zeros.index_add(0, segment, masked_fill_zero(values_BR, mask_BR).flatten())
    count = zeros.index_add(0, segment, mask_BR.flatten().to(values_BR.dtype))
    return masked_fill_zero((total / count.clamp(min=1))[segment].view(rows, width), mask_BR)


def bounded(weights_BR: Tensor, bounds: Bounds) -> Tensor:
    """Truncate the weights at the cap; with a lower bound too, set those outside both bounds to 0 (IcePop)."""
    if bounds.high is None:
        return weights_BR
    if bounds.low is None:
        return weights_BR.clamp(max=bounds.high)
    inside_BR = (weights_BR >= bounds.low) & (weights_BR <= bounds.high)
    return masked_fill_zero(weights_BR, inside_BR)


def mean_weight(weights_BR: Tensor, gap: Gap, level: str) -> Tensor:
    """Mean of the weights over tokens (level token), else over rows of the row's mean; 0 where there is none.

    The rows of one episode count once.
    """
    if level == "token":
        return masked_mean(weights_BR, gap.mask_BR)
    counted_B = gap.counted(gap.mask_BR.any(dim=1))
    return (masked_mean(weights_BR, gap.mask_BR, dim=1) * counted_B).sum() / counted_B.sum().clamp(min=1e-12)


def weight_of_row(weights_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Geometric mean of each row's weights [B, 1]; 1 for an empty row.

    A weight of 0 counts as 1e-10, as in verl, so that one token outside the bounds does not silence its whole row.
    """
    return masked_mean(weights_BR.clamp(min=SMALLEST_WEIGHT).log(), mask_BR, dim=1).exp()[:, None]


def count_weights(raw_BR: Tensor, weights_BR: Tensor, gap: Gap, bounds: Bounds, level: str) -> Tally:
    """Sums before (raw) and after the bounds, as verl reports them. Without a lower bound, low means below 1 / cap.

    Where a row has one weight, shares outside the bounds and extremes are those of the rows' raw weights; elsewhere
    shares are those of the tokens' raw weights, and extremes those of the weights that are applied.
    """
    high = LARGEST_WEIGHT if bounds.high is None else bounds.high
    low = 1 / high if bounds.low is None else bounds.low
    mask_BR = gap.mask_BR
    rows_B, raw_B = mask_BR.any(dim=1), masked_mean(raw_BR, mask_BR, dim=1)
    of_rows, counted_B = level in ("sequence", "geometric"), gap.counted(rows_B)
    judged, units = (raw_B, counted_B) if of_rows else (raw_BR, mask_BR)
    extreme_BR = raw_BR if of_rows else weights_BR
    counted = {
        "weight": weights_BR,
        "weight_squared": weights_BR**2,
        "weight_zeroed": (weights_BR == 0) & mask_BR,
        "weight_tokens": mask_BR,
        "weight_high": (judged > high) * units,
        "weight_low": (judged < low) * units,
        "weight_units": units,
        "weight_rows_high": (raw_B > high) * counted_B,
        "weight_rows_low": (raw_B < low) * counted_B,
    }
    tally = Tally(
        sums={name: value.double().sum() for name, value in counted.items()},
        maxima={"max_weight": largest(extreme_BR, mask_BR), "min_weight": largest(-extreme_BR, mask_BR)},
    )
    return tally.joined(count_rows("weight", masked_mean(weights_BR, mask_BR, dim=1), rows_B, gap))


LARGEST_WEIGHT = 1e9  # above exp(20), which no weight exceeds
SMALLEST_WEIGHT = 1e-10

# ---- rejections


def reject(gap: Gap, known_BR: Tensor, rejections: tuple[Rejection, ...], veto: float | None) -> tuple[Tensor, Tally]:
    """Sampled tokens that pass every rejection (bool [B, R]), out of `known_BR`, and the sums for the metrics."""
    keep_BR, tally = known_BR, Tally()
    sampled_BR = gap.mask_BR | gap.unknown_BR
    for rejection in rejections:
        statistic_BR = rejection_statistic(gap, rejection)
        passed_BR = within(statistic_BR, rejection) | ~gap.mask_BR
        keep_BR = keep_BR & passed_BR
        tally = tally.joined(_count_option(rejection, statistic_BR, passed_BR, gap))
    if veto is not None:
        fatal_BR = (gap.log_ratio_BR < math.log(veto)) & gap.mask_BR
        keep_BR = keep_BR & ~fatal_BR.any(dim=1, keepdim=True)
        vetoed = gap.counted(fatal_BR.any(dim=1)).sum()
        sums = {"vetoed_rows": vetoed, "veto_tokens": fatal_BR.double().sum()}
        tally = tally.joined(Tally(sums=sums))
    rejected_BR = sampled_BR & ~keep_BR
    counts = {
        "rejected_tokens": rejected_BR,
        "touched_rows": gap.counted(rejected_BR.any(dim=1)),
        "dropped_rows": gap.counted(sampled_BR.any(dim=1) & ~keep_BR.any(dim=1)),
        "all_tokens": sampled_BR,
        "all_rows": gap.counted(sampled_BR.any(dim=1)),
    }
    return keep_BR, tally.joined(Tally(sums={name: value.double().sum() for name, value in counts.items()}))


def rejection_statistic(gap: Gap, rejection: Rejection) -> Tensor:
    """The statistic of each token, joined over its turn or row as the level says: [B, R], 0 outside the mask."""
    values_BR, mask_BR = token_statistic(gap, rejection.statistic), gap.mask_BR
    if rejection.level == "token":
        return values_BR
    if rejection.level == "segment_mean":
        return segment_mean(values_BR, mask_BR)
    if rejection.level == "seq_sum":
        joined_B = masked_sum(values_BR, mask_BR, dim=1)
    elif rejection.level == "seq_mean":
        joined_B = masked_mean(values_BR, mask_BR, dim=1)
    else:  # seq_max: of k2 and k3, which are 0 or more
        joined_B = masked_fill_zero(values_BR, mask_BR).amax(dim=1)
    return masked_fill_zero(joined_B[:, None].expand_as(values_BR), mask_BR)


def token_statistic(gap: Gap, statistic: str) -> Tensor:
    """Statistic of each token; lr = log p - log q, k1 = -lr, k2 = lr^2 / 2, k3 = exp(lr) - 1 - lr, diff = p - q."""
    ratio_log_BR = gap.log_ratio_BR.clamp(-LOG_LIMIT, LOG_LIMIT)
    if statistic == "k1":
        return -ratio_log_BR
    if statistic == "k2":
        return 0.5 * ratio_log_BR**2
    if statistic == "k3":
        return ratio_log_BR.exp() - 1 - ratio_log_BR
    return gap.policy_BR.exp() - gap.rollout_BR.exp()


def within(statistic_BR: Tensor, rejection: Rejection) -> Tensor:
    """True where the statistic lies inside the rejection's bounds: bool [B, R]."""
    low, high = statistic_bounds(rejection)
    return (statistic_BR >= low) & (statistic_BR <= high)


def statistic_bounds(rejection: Rejection) -> tuple[float, float]:
    """Bounds of the statistic itself: those of k1 are given as ratios q / p; k2 and k3 are 0 or more by themselves."""
    low, high = rejection.bounds.low, rejection.bounds.high
    if rejection.statistic == "k1":
        low, high = (None if bound is None else math.log(bound) for bound in (low, high))
    return -math.inf if low is None else low, math.inf if high is None else high


def _count_option(rejection: Rejection, statistic_BR: Tensor, passed_BR: Tensor, gap: Gap) -> Tally:
    """Sums behind `rollout_rs_<option>_*`; the row's value of a token's statistic is its mean."""
    name, (low, high) = rejection.name, statistic_bounds(rejection)
    mask_BR = gap.mask_BR
    rows_B, row_B = mask_BR.any(dim=1), masked_mean(statistic_BR, mask_BR, dim=1)
    counted_B = gap.counted(rows_B)
    judged, units = (row_B, counted_B) if rejection.level.startswith("seq") else (statistic_BR, mask_BR)
    bounded_BR = masked_fill_zero(statistic_BR.clamp(low, high), mask_BR)
    failed_BR = mask_BR & ~passed_BR
    counted = {
        "sum": masked_fill_zero(statistic_BR, mask_BR),
        "bounded": bounded_BR,
        "bounded_squared": bounded_BR**2,
        "tokens": mask_BR,
        "high": (judged > high) * units,
        "low": (judged < low) * units,
        "units": units,
        "rows_high": (row_B > high) * counted_B,
        "rows_low": (row_B < low) * counted_B,
        "masked": failed_BR,
        "masked_rows": gap.counted(failed_BR.any(dim=1)),
    }
    option = f"option/{name}"
    tally = Tally(
        sums={f"{option}/{key}": value.double().sum() for key, value in counted.items()},
        maxima={f"max_{option}": largest(statistic_BR, mask_BR), f"min_{option}": largest(-statistic_BR, mask_BR)},
    )
    return tally.joined(count_rows(option, row_B, rows_B, gap))


# ---- on the driver


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCorrection:
    """Corrections that the driver made, and the columns that it leaves to the update."""

    mask_T: Tensor  # bool: sampled tokens to train on
    weights_T: Tensor | None = None  # float32: constants on the policy loss
    rollout_log_probs_T: Tensor | None = None  # present where the update must compare with its own log-probs
    metrics: dict[str, float]


def correct_on_driver(
    correction: RolloutCorrectionConfig, actor: ActorConfig, rollouts: Rollouts, evaluated: Evaluated
) -> DriverCorrection:
    """Measure and correct where the driver has the trainer's old log-probs; otherwise leave it to the update.

    Raises ValueError without rollout log-probs to correct by, and when every token is rejected: a run that trains on
    nothing must not look like one that trains.
    """
    mask_T, rollout_T = rollouts.response_mask_T, rollouts.rollout_log_probs_T
    if rollout_T is None:
        if corrects(correction) or uses_sampler_log_probs(actor, correction):
            raise ValueError("algorithm.rollout_correction needs rollout log-probs, but these rollouts have none")
        return DriverCorrection(mask_T=mask_T, metrics={})
    old_T = evaluated.old_log_probs_T
    if old_T is None or old_T is rollout_T or uses_sampler_log_probs(actor, correction):
        return DriverCorrection(mask_T=mask_T, rollout_log_probs_T=rollout_T, metrics={})
    acts, length_B = corrects(correction), rollouts.response_length_B
    share_B, tally, num_unknown = shares_of_episodes(rollouts), Tally(), 0
    keep_T, weights_T = (torch.zeros_like(mask_T) if acts else mask_T), None
    blocks = Blocks(length_B)
    for rows in blocks:
        log_p_bR, log_q_bR, mask_bR = (blocks.padded(column, rows) for column in (old_T, rollout_T, mask_T))
        gap = gap_between(log_p_bR, log_q_bR, mask_bR, share_B[rows])
        num_unknown += int(gap.unknown_BR.sum())
        counted = count_gap(gap)
        if acts:
            found = correct(gap, dataclasses.replace(correction, rollout_is_batch_normalize=False))
            blocks.put(keep_T, rows, found.keep_BR)
            if found.weights_BR is not None:
                weights_T = torch.zeros(mask_T.shape) if weights_T is None else weights_T
                blocks.put(weights_T, rows, found.weights_BR)
            counted = counted.joined(found.tally)
        tally = tally.added(counted)
    metrics = finish(tally.numbers()) | {NONFINITE: float(num_unknown)}
    if not acts:
        return DriverCorrection(mask_T=mask_T, metrics=metrics)
    if weights_T is not None and correction.rollout_is_batch_normalize:
        factor = _mean_of(tally, correction.rollout_is) or 1.0
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
        weights_T /= factor
    if not keep_T.any():
        raise ValueError(_all_rejected(correction, metrics, int(mask_T.sum())))
    return DriverCorrection(mask_T=keep_T, weights_T=weights_T, metrics=metrics)


def shares_of_episodes(rollouts: Rollouts) -> Tensor:
    """Each row's share of its episode's sampled tokens, float64 [B] (masked.share_of_episode)."""
    if rollouts.episode_B is None:
        return torch.ones(len(rollouts), dtype=torch.float64)
    episodes, sampled_B = Episodes.of(rollouts), row_sums(rollouts.response_mask_T, rollouts.response_length_B)
    return sampled_B.double() / episodes.of_rows(episodes.sums(sampled_B)).clamp(min=1)


def _mean_of(tally: Tally, level: str | None) -> float:
    """`mean_weight` of all rows that were counted."""
    total, count = ("weight", "weight_tokens") if level == "token" else ("rows/weight", "num_rows/weight")
    least = 1.0 if level == "token" else 1e-12
    return (tally.sums[total] / tally.sums[count].clamp(min=least)).item()


def _all_rejected(correction: RolloutCorrectionConfig, metrics: dict[str, float], num_tokens: int) -> str:
    measured = {n: f"{v:.4g}" for n, v in metrics.items() if n.endswith(("_mean", "_min", "_max", "nonfinite"))}
    return (
        f"algorithm.rollout_correction rejected all {num_tokens} sampled tokens (rollout_rs={correction.rollout_rs}, "
        f"rollout_rs_threshold={correction.rollout_rs_threshold}, rollout_token_veto_threshold="
        f"{correction.rollout_token_veto_threshold}); widen the bounds, or find out why they differ: {measured}"
    )
