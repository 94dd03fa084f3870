"""Statistics over the true entries of a mask. All are defined (0) when nothing is true: an empty row is no accident."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

WHITEN_EPS = 1e-8
_BLOCK = 2**19  # entries: float64 of so many is reused by the allocator, and stays in a processor's cache


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
    """Share of each row in its episode's sampled tokens, float64 [B]; used as a weight, it makes an episode count once.

    `episode_tokens_B` None means that every row is an episode, with share 1.
    """
    if episode_tokens_B is None:
        return torch.ones(len(mask_BR), dtype=torch.float64, device=mask_BR.device)
    return mask_BR.sum(dim=1).double() / episode_tokens_B.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased (Bessel) variance over the true entries; 0 with fewer than two."""
    return _variance(values, mask, masked_mean(values, mask))


def _variance(values: Tensor, mask: Tensor, mean: Tensor) -> Tensor:
    """Unbiased variance about the given mean, in the mean's precision."""
    squares = torch.zeros_like(mean)
    for rows in _blocks(values):
        squares = squares + masked_sum((values[rows].to(mean.dtype) - mean) ** 2, mask[rows])
    return squares / (mask.sum() - 1).clamp(min=1)


def _blocks(values: Tensor) -> Iterator[slice]:
    """Cut the first axis into pieces, small enough that temporaries computed from one piece are small too."""
    size = max(1, _BLOCK // max(1, values[:1].numel()))
    return (slice(start, start + size) for start in range(0, len(values), size))


def token_spread(values: Tensor, mask: Tensor) -> tuple[float, float, float]:
    """Mean, largest and smallest of the true entries; the mean in float64. Raises ValueError where there is none."""
    total, count = 0.0, 0
    most, least = (values.new_full((), float(limit)) for limit in ("-inf", "inf"))
    for rows in _blocks(values):
        found = values[rows] if mask[rows].all() else values[rows][mask[rows]]
        if found.numel():
            total += found.sum(dtype=torch.float64).item()
            count += found.numel()
            most, least = torch.maximum(most, found.max()), torch.minimum(least, found.min())  # a NaN stays
    if not count:
        raise ValueError("there is no token to take a mean of")
    return total / count, most.item(), least.item()


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the true entries, 0 elsewhere.

    Computed in float64: rounding of the mean, times 1 / sqrt(1e-8), would make equal values visibly different.
    """
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for rows in _blocks(values):
        total = total + masked_sum(values[rows].double(), mask[rows])
    mean = total / mask.sum().clamp(min=1)
    scale = torch.rsqrt(_variance(values, mask, mean) + WHITEN_EPS)
    whitened = torch.zeros_like(values)
    for rows in _blocks(values):
        whitened[rows] = masked_fill_zero((values[rows].double() - mean) * scale, mask[rows]).to(values.dtype)
    return whitened


def whitened_rows(values_B: Tensor, count_B: Tensor) -> Tensor:
    """`masked_whiten` of values that are the same on all `count_B` tokens of a row: float64 [B]."""
    values_B, total = values_B.double(), count_B.sum()
    mean = (values_B * count_B).sum() / total.clamp(min=1)
    variance = ((values_B - mean) ** 2 * count_B).sum() / (total - 1).clamp(min=1)
    return (values_B - mean) * torch.rsqrt(variance + WHITEN_EPS)
