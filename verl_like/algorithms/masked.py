"""Statistics over the true entries of a mask. All are defined (0) when nothing is true: an empty row is no accident."""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPS = 1e-8


def masked_fill_zero(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 where `mask` is false, whatever stood there (NaN and inf included)."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over the true entries, of everything or along `dim`."""
    return masked_fill_zero(values, mask).sum() if dim is None else masked_fill_zero(values, mask).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over the true entries; 0 where there is none."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def share_of_episode(mask_BR: Tensor, episode_tokens_B: Tensor | None) -> Tensor:
    """Each row's share of its episode's sampled tokens, float64 [B]: with it as weight an episode counts once.

    None: every row is an episode, and its share 1.
    """
    if episode_tokens_B is None:
        return torch.ones(len(mask_BR), dtype=torch.float64, device=mask_BR.device)
    return mask_BR.sum(dim=1).double() / episode_tokens_B.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased (Bessel) variance over the true entries; 0 with fewer than two."""
    squares = masked_sum((values - masked_mean(values, mask)) ** 2, mask)
    return squares / (mask.sum() - 1).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the true entries, 0 elsewhere.

    Computed in float64: rounding of the mean, times 1 / sqrt(1e-8), would make equal values visibly different.
    """
    exact = values.double()
    whitened = (exact - masked_mean(exact, mask)) * torch.rsqrt(masked_var(exact, mask) + WHITEN_EPS)
    return masked_fill_zero(whitened, mask).to(values.dtype)
