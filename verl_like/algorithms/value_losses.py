"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.algorithms.losses.base import TokenLoss


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
