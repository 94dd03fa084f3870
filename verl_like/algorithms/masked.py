"""Statistics over the true entries of a mask. All are defined (0) when nothing is true: an empty row is no accident."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

WHITEN_EPS = 1e-8
_BLOCK = 2**19  # entries: float64 of so many is reused by the allocator, and stays in a processor's cache


def row_blocks(shape: tuple[int, ...] | torch.Size, entries: int = _BLOCK) -> Iterator[slice]:
    """Neighbouring rows of a [B, R] batch, few enough that what is computed of them in between stays small.

    A batch of ten thousand long responses has float64 temporaries of gigabytes, and getting that memory from the
    system takes longer than the arithmetic.
    """
    rows = max(1, entries // max(1, shape[1]))
    for start in range(0, shape[0], rows):
        yield slice(start, start + rows)


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
    return _variance(values, mask, masked_mean(values, mask))


def _variance(values: Tensor, mask: Tensor, mean: Tensor) -> Tensor:
    """About this mean, in its precision."""
    squares = torch.zeros_like(mean)
    for rows in _blocks(values):
        squares = squares + masked_sum((values[rows].to(mean.dtype) - mean) ** 2, mask[rows])
    return squares / (mask.sum() - 1).clamp(min=1)


def _blocks(values: Tensor) -> Iterable[slice]:
    return row_blocks(values.shape) if values.ndim == 2 else (slice(None),)


def token_spread(values_BR: Tensor, mask_BR: Tensor) -> tuple[float, float, float]:
    """Mean, largest and smallest of the true entries; the mean in float64. ValueError where there is none."""
    total, count = 0.0, 0
    most, least = (values_BR.new_full((), float(limit)) for limit in ("-inf", "inf"))
    for rows in row_blocks(values_BR.shape):
        values = values_BR[rows][mask_BR[rows]]
        if len(values):
            total += values.sum(dtype=torch.float64).item()
            count += len(values)
            most, least = torch.maximum(most, values.max()), torch.minimum(least, values.min())  # a NaN stays
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
