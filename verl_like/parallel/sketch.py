"""Sketches of matrices: what is left of W in W @ R, with R fixed random signs. They add up over parts, as checksums do.

For a copy that is not exact (quantised weights), compared without keeping the original: if it differs by e, the
sketches do by e @ R, which is normal with the deviation of e's rows. Source: Alon, Matias and Szegedy, "The space
complexity of approximating the frequency moments" (1996).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from verl_like.parallel.checksum import Slice

WIDTH = 8
_BLOCK = 2**22  # numbers


def sketch(part: Slice) -> Tensor:
    """What a part of a matrix adds to the sketch of its rows: float64 [r, WIDTH], on the CPU."""
    signs_CK = _signs(part.column + part.values.shape[1])[part.column :].to(part.values.device).double()
    return torch.cat([rows @ signs_CK for rows in blocks(part.values)]).cpu()


def blocks(values_RC: Tensor) -> Iterator[Tensor]:
    """Its rows in float64, so many at a time that the copies stay small beside the weights of a model."""
    for rows in values_RC.detach().split(max(1, _BLOCK // values_RC.shape[1])):
        yield rows.double()


@functools.lru_cache(maxsize=64)
def _signs(count: int) -> Tensor:
    """The first rows of R, the same in every process."""
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0)
        return torch.randint(2, (count, WIDTH), generator=generator).float().mul_(2).sub_(1)
