"""Checksums of tensors that add up over parts: a whole, its shards and an engine's slices of it give one number.

A tensor is seen as a matrix of its last axis. Every entry adds its bits times a weight of its row and one of its
column, modulo 2**64: exact, the same on every device and in every order, so no tolerance is needed; and two tensors
exchanged, or rows permuted, change it. Equal tensors of one dtype have equal sums, different ones collide with a chance
of about 2**-32 at worst (a sign flipped in float32), else 2**-64.

-0, and numbers below the smallest normal one, count as 0: kernels for 16-bit formats drop them.

Sketches, for a copy that is not exact (quantised weights), compared without keeping the original: what is left of W in
W @ R, with R fixed random signs. They add up over parts too. If the copy differs by e, the sketches do by e @ R, which
is normal with the deviation of e's rows. Source: Alon, Matias and Szegedy, "The space complexity of approximating the
frequency moments" (1996).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd 64-bit constant (golden ratio): consecutive weights share no pattern
_TURN = 0x2545F4914F6CDD1D  # another one, so that rows and columns have other weights
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 22}  # entries whose int64 copies exist at a time; on a CPU in its cache


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a matrix: `values` [r, c] are its entries from (row, column) on."""

    values: Tensor
    row: int
    column: int


def as_matrix(tensor: Tensor) -> Tensor:
    """View a tensor as [everything else, last axis]; a vector or number becomes one row."""
    return tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.flatten(0, -2)


def checksum(tensor: Tensor) -> Tensor:
    """Checksum of a whole tensor: int64, without dimensions, on its device; does not wait for the device."""
    return checksum_of(Slice(as_matrix(tensor), 0, 0))


def checksum_of(part: Slice) -> Tensor:
    """Amount that a part adds to the checksum of the whole: int64, without dimensions."""
    table_RC = part.values.detach()
    (rows, width), device = table_RC.shape, table_RC.device
    columns_C = _weights(part.column, width, _TURN, device)
    at_once = max(1, _AT_ONCE.get(device.type, 1 << 22) // max(width, 1))
    blocks = (_bits(table_RC[r : r + at_once]) for r in range(0, rows, at_once))
    # Widened first: torch multiplies numbers of two types two to three times slower.
    sums = [block.to(torch.int64, copy=True).mul_(columns_C).sum(1) for block in blocks]
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    return (torch.cat(sums) * _weights(part.row, rows, _STEP, device)).sum()


def values_of(sums: list[Tensor]) -> list[int]:
    """Fetch checksums as numbers; waits for the device once, where all are on one."""
    if not sums:
        return []
    if len({total.device for total in sums}) == 1:
        return torch.stack(sums).tolist()
    return [int(total) for total in sums]


def total(sums: list[int]) -> int:
    """Add up the checksums of parts, as int64 would."""
    return (sum(sums) + 2**63) % 2**64 - 2**63


def _bits(table: Tensor) -> Tensor:
    if table.is_floating_point():
        limits = torch.finfo(table.dtype)
        table = functional.hardshrink(table, limits.tiny * (1 - limits.eps))  # 0 for all that is not beyond
    return table.view(_BITS[table.element_size()])


@functools.lru_cache(maxsize=256)
def _weights(first: int, count: int, step: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        weight = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device) * step
        return (weight ^ (weight >> 29)) | 1  # mixes high bits into low ones; odd, so that no bit is lost


WIDTH = 8
_BLOCK = 2**22  # numbers


def sketch(part: Slice) -> Tensor:
    """Amount that a part of a matrix adds to the sketch of its rows: float64 [r, WIDTH], on the CPU."""
    signs_CK = _signs(part.column + part.values.shape[1])[part.column :].to(part.values.device).double()
    return torch.cat([rows @ signs_CK for rows in blocks(part.values)]).cpu()


def blocks(values_RC: Tensor) -> Iterator[Tensor]:
    """Yield the rows in float64, so many at a time that the copies stay small beside the weights of a model."""
    for rows in values_RC.detach().split(max(1, _BLOCK // values_RC.shape[1])):
        yield rows.double()


@functools.lru_cache(maxsize=64)
def _signs(count: int) -> Tensor:
    """Rows of R from the first on, the same in every process."""
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0)
        return torch.randint(2, (count, WIDTH), generator=generator).float().mul_(2).sub_(1)
