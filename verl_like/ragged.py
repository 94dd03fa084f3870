"""Rows of different lengths: padded to [B, W], or flat, one behind the other, [T].

Flat is how they are computed end to end, sent and kept; padded is what arithmetic over positions needs. Rows are copied
one by one: at the lengths of responses that is several times faster than a boolean index over [B, W].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Side = Literal["left", "right"]
"""Where the padding is."""

_AS_INTEGERS = {torch.bfloat16: torch.int16}  # numpy has no type of theirs: they are moved as bits


class Pickled(NamedTuple):
    """A tensor of the CPU. bits: of bfloat16, as integers."""

    values: NDArray[Any]
    bits: bool


def flat_rows(padded_BW: Tensor, lengths: Sequence[int], side: Side) -> Tensor:
    """The real entries, [T]: row b has lengths[b], at its start ("right") or its end ("left")."""
    if padded_BW.device.type != "cpu":
        return padded_BW[_real(lengths, padded_BW.shape[1], side).to(padded_BW.device)]
    values = _array(padded_BW)
    width = values.shape[1]
    parts = [row[:n] if side == "right" else row[width - n :] for row, n in zip(values, lengths, strict=True)]
    return _tensor(np.concatenate(parts) if parts else values[:0].reshape(-1), padded_BW.dtype)


def padded_rows(values_T: Tensor, lengths: Sequence[int], width: int, side: Side, fill: float = 0) -> Tensor:
    """Inverse of `flat_rows`: [B, width], `fill` in the padding."""
    shape = (len(lengths), width)
    if values_T.device.type != "cpu":
        padded_BW = torch.full(shape, fill, dtype=values_T.dtype, device=values_T.device)
        padded_BW[_real(lengths, width, side).to(values_T.device)] = values_T
        return padded_BW
    filled = torch.zeros(shape, dtype=values_T.dtype)  # from the system: pages that nobody writes cost nothing
    if fill:
        filled.fill_(fill)
    target, source = _array(filled), _array(values_T)
    for row, (start, stop) in zip(target, pairwise(accumulate(lengths, initial=0)), strict=True):
        if side == "right":
            row[: stop - start] = source[start:stop]
        else:
            row[width - (stop - start) :] = source[start:stop]
    return filled


def pad_to_width(value: Tensor, width: int, side: Side, fill: float) -> Tensor:
    """Widen [B, w] to [B, width] with `fill` in the new padding."""
    missing = width - value.shape[1]
    padding = (0, missing) if side == "right" else (missing, 0)
    return torch.nn.functional.pad(value, padding, value=fill) if missing else value


def plain(values: Tensor) -> Any:
    """A tensor in the form in which it is pickled: torch's own takes a third of a millisecond for each."""
    return Pickled(_array(values), values.dtype in _AS_INTEGERS) if values.device.type == "cpu" else values


def revived(given: Any) -> Any:
    """Inverse of `plain`; anything else is returned as it is."""
    if not isinstance(given, Pickled):
        return given
    return torch.from_numpy(given.values).view(torch.bfloat16) if given.bits else torch.from_numpy(given.values)


def _real(lengths: Sequence[int], width: int, side: Side) -> Tensor:
    """[B, width] bool, true where an entry is real."""
    length_B1, place_W = torch.tensor(lengths, dtype=torch.int64)[:, None], torch.arange(width)
    return place_W < length_B1 if side == "right" else place_W >= width - length_B1


def _array(values: Tensor) -> NDArray[Any]:
    values = values.detach()
    bits = _AS_INTEGERS.get(values.dtype)
    return (values if bits is None else values.view(bits)).numpy()


def _tensor(values: NDArray[Any], dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor.view(dtype) if dtype in _AS_INTEGERS else tensor
