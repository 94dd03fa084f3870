"""Policy losses of a token, written down once more for one row: the yardstick of the check.

Formulas are those of docs/algorithms.md. What stands where nothing is trained on is of no account: rows are joined by
their masks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verl_like.config import ActorConfig

_SHARE = "seq-mean-token-mean"
_PRESCRIBED = {"luspo": "seq-mean-token-sum", "geo_mean": _SHARE, "vespo": "token-mean", "sapo": _SHARE}
_USUAL = {"gspo": _SHARE, "gspo_token": _SHARE}  # where loss_agg_mode is null


def joined_by(actor: ActorConfig) -> str:
    """Return the loss_agg_mode of the policy loss."""
    mode = actor.policy_loss.loss_mode
    return _PRESCRIBED.get(mode) or actor.loss_agg_mode or _USUAL.get(mode, "token-mean")


def mode_loss(
    actor: ActorConfig, log_p: Tensor, old: Tensor, gain: Tensor, mask: Tensor, chosen: Tensor | None, score: float
) -> Tensor | None:
    """Compute the loss of each token of one row, [R] or one number for all; None for a loss of the user's own.

    Args:
        actor: loss mode and its options.
        log_p: log-probs of now, with a graph.
        old: log-probs of before the update.
        gain: advantages.
        mask: bool; tokens that are trained on.
        chosen: bool; tokens that clip_cov and kl_cov select over the mini-batch.
        score: of the response, as graded.
    """
    options, moved, good, most = actor.policy_loss, log_p - old, gain > 0, actor.clip_ratio_c or math.inf
    low, high = (actor.clip_ratio if side is None else side for side in (actor.clip_ratio_low, actor.clip_ratio_high))
    ratio, whole, count = _exp(moved), moved[mask].sum(), mask.sum().clamp(min=1)
    within = ratio.clip(1 - low, 1 + high)

    def clipped(by: Tensor) -> Tensor:
        return -torch.minimum(gain * by, gain * by.clip(1 - low, 1 + high))

    def weighted(weight: Tensor, by: Tensor = gain) -> Tensor:
        return -weight.detach() * by * log_p

    match options.loss_mode:
        case "vanilla":  # dual clip: bounds what a negative advantage can cost
            return torch.minimum(clipped(ratio), torch.where(gain < 0, -gain * most, math.inf))
        case "gpg" | "policy_gradient":
            return -gain * log_p
        case "gspo" | "luspo":
            return clipped(_exp(whole / count))
        case "gspo_token":  # the row's ratio, with each token's own gradient
            return clipped(_exp(moved - moved.detach() + (whole / count).detach()))
        case "geo_mean":
            cut = torch.where(good, moved.clip(max=high), moved.clip(min=-low)) * (gain != 0)
            return -gain[mask].sum() / count * _exp(cut[mask].sum() / count)
        case "clip_cov" if chosen is not None:
            return clipped(ratio).masked_fill(chosen & (gain * within >= gain * ratio), 0.0)
        case "kl_cov" if chosen is not None:
            return -gain * ratio + options.ppo_kl_coef * moved.abs() * chosen
        case "cispo":
            return weighted(within)
        case "topr":
            reward = gain if options.topr.reward_source == "advantage" else torch.full_like(gain, score)
            by_row = options.topr.ratio_level == "seq"
            fading = options.topr.negative_weight * (_exp(whole) if by_row else ratio).clip(max=1)
            bad = (reward[mask].sum() if by_row else reward) < 0
            return weighted(torch.where(bad, fading, options.topr.positive_weight), reward)
        case "vespo":
            log_w = moved.clip(-20, 20)[mask].sum()
            power = torch.where(gain >= 0, options.vespo_k_pos, options.vespo_k_neg)
            slope = torch.where(gain >= 0, options.vespo_lambda_pos, options.vespo_lambda_neg)
            return weighted((power * log_w + slope * (1 - log_w.clip(max=20).exp())).exp())
        case "dppo_tv" | "dppo_kl":
            near = _is_near(log_p.detach(), old, good, (low, high), by_kl=options.loss_mode == "dppo_kl")
            return weighted(ratio.clip(max=most) * near)
        case "sapo":
            tau = torch.where(good, actor.tau_pos, actor.tau_neg)
            return -gain * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
        case "dro":
            return -gain * log_p + options.dro_beta / 2 * moved.square()
        case "kimi":
            return -gain * log_p + options.kimi_tau / 2 * whole.square() / count
    return None


def _is_near(log_p: Tensor, old: Tensor, good: Tensor, bound: tuple[float, float], *, by_kl: bool) -> Tensor:
    """DPPO's trust region: True where the token's probability has moved little, or its gradient leads back."""
    p, q = log_p.exp(), old.exp()
    if not by_kl:
        return torch.where(good, p - q <= bound[1], q - p <= bound[0])
    rest = ((1 - q).clip(min=1e-8) / (1 - p).clip(min=1e-8)).log()
    near = q * (old - log_p) + (1 - q) * rest <= torch.where(good, bound[1], bound[0])
    return near | torch.where(good, p <= q, p >= q)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clip(-20, 20).exp()
