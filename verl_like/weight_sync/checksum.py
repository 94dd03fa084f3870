"""A checksum of a tensor that sees position: two equal-shaped tensors exchanged, or rows permuted, change it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_WIDTH = 1 << 12  # elements of one row: positions are cut into rows and columns, each with weights of its own
_ROWS = 1 << 10  # rows at a time; bounds the int64 copies to 32 MiB
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd 64-bit constant (golden ratio): consecutive weights share no pattern
_TURN = 0x2545F4914F6CDD1D  # another one, so that rows and columns have other weights
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """Sum of bit pattern times a weight per position, modulo 2**64: exact, the same on every device. int64, without
    dimensions, on the tensor's device; nothing waits for it.

    Equal tensors of one dtype have equal sums; different ones collide with a chance of about 2**-64.
    """
    flat = tensor.detach().contiguous().flatten().view(_BITS[tensor.element_size()])
    columns_W = _column_weights(flat.device)
    whole = flat.numel() // _WIDTH
    table_RW, rest = flat[: whole * _WIDTH].view(whole, _WIDTH), flat[whole * _WIDTH :]
    sums = [(table_RW[start : start + _ROWS] * columns_W).sum(1) for start in range(0, whole, _ROWS)]
    sums_R = torch.cat([*sums, (rest * columns_W[: rest.numel()]).sum()[None]])
    return (sums_R * _weights(whole + 1, _STEP, flat.device)).sum()


@functools.lru_cache(maxsize=16)
def _column_weights(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _weights(_WIDTH, _TURN, device)


def _weights(count: int, step: int, device: torch.device) -> Tensor:
    weight = torch.arange(1, count + 1, dtype=torch.int64, device=device) * step
    return (weight ^ (weight >> 29)) | 1  # mixes high bits into low ones; odd, so that no bit is lost


def values(sums: list[Tensor]) -> list[int]:
    """Checksums as numbers; waits for the device once, where all are on one."""
    if len({total.device for total in sums}) == 1:
        return torch.stack(sums).tolist()
    return [int(total) for total in sums]
