"""Columns of rows of different lengths: flat, one row behind the other, [T]; and padded to [B, W] where it must be.

Flat is how they are computed end to end, sent and kept; padded is what arithmetic over positions needs. On a CPU rows
are copied one by one: at the lengths of responses that is several times faster than an index for each token.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Side = Literal["left", "right"]
"""Where the padding is."""

_AS_INTEGERS = {torch.bfloat16: torch.int16}  # numpy has no type of theirs: they are moved as bits
_BLOCK = 2**19  # entries: float64 of so many is reused by the allocator, and stays in a processor's cache


class Pickled(NamedTuple):
    """A tensor of the CPU. bits: of bfloat16, as integers."""

    values: NDArray[Any]
    bits: bool


def bounds(length_B: Tensor) -> list[int]:
    """Compute where each row begins in [T], and where the last one ends: B + 1 numbers."""
    return [0, *length_B.cumsum(0).tolist()]


def take_rows(values_T: Tensor, length_B: Tensor, rows: Sequence[int], ends: Sequence[int] | None = None) -> Tensor:
    """The rows at these positions, in this order. Neighbours that are most of them are no copy. ends: `bounds`."""
    ends = bounds(length_B) if ends is None else ends
    if not rows:
        return values_T[:0]
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        values = values_T[ends[rows[0]] : ends[rows[-1] + 1]]
        return values if 2 * len(values) >= len(values_T) else values.clone()
    if values_T.device.type != "cpu" or values_T.requires_grad:
        return torch.cat([values_T[ends[row] : ends[row + 1]] for row in rows])
    values = _array(values_T)
    return _tensor(np.concatenate([values[ends[row] : ends[row + 1]] for row in rows]), values_T.dtype)


def flat_rows(padded_BW: Tensor, length_B: Tensor, side: Side) -> Tensor:
    """The real entries, [T, ...]: row b has length_B[b], at its start ("right") or its end ("left")."""
    width = padded_BW.shape[1]
    _require_room(length_B, width)
    if len(length_B) and int(length_B.min()) == width:
        return padded_BW.flatten(0, 1)
    if padded_BW.device.type != "cpu" or padded_BW.requires_grad:
        return padded_BW.flatten(0, 1)[places(length_B.to(padded_BW.device), width, side)]
    values, lengths = _array(padded_BW), length_B.tolist()
    parts = [row[:n] if side == "right" else row[width - n :] for row, n in zip(values, lengths, strict=True)]
    return _tensor(np.concatenate(parts) if parts else values[:0].reshape(0, *values.shape[2:]), padded_BW.dtype)


def padded_rows(
    values_T: Tensor,
    length_B: Tensor,
    width: int,
    side: Side = "right",
    fill: float = 0,
    places_T: Tensor | None = None,
) -> Tensor:
    """Inverse of `flat_rows`: [B, width, ...], `fill` in the padding. Differentiable. places_T: of these rows."""
    shape = (len(length_B), width, *values_T.shape[1:])
    if values_T.device.type != "cpu" or values_T.requires_grad:
        if places_T is None:
            _require_room(length_B, width)
            places_T = places(length_B.to(values_T.device), width, side, len(values_T))
        return values_T.new_full((shape[0] * width, *shape[2:]), fill).index_copy(0, places_T, values_T).view(shape)
    filled = torch.zeros(shape, dtype=values_T.dtype)  # from the system: pages that nobody writes cost nothing
    if fill:
        filled.fill_(fill)
    target, source, ends = _array(filled), _array(values_T), bounds(length_B)
    for row, start, stop in zip(target, ends, ends[1:], strict=False):
        if side == "right":
            row[: stop - start] = source[start:stop]
        else:
            row[width - (stop - start) :] = source[start:stop]
    return filled


def row_sums(values_T: Tensor, length_B: Tensor) -> Tensor:
    """Sum over each row [B], in float64 (counts: int64); 0 over none."""
    if values_T.dtype == torch.bool and values_T.all():
        return length_B.clone()
    kind = torch.float64 if values_T.dtype.is_floating_point else torch.int64
    sums = torch.zeros(len(length_B), dtype=kind, device=values_T.device)
    for rows, tokens in flat_blocks(length_B):
        values, lengths = values_T[tokens].double(), length_B[rows]
        sums[rows] = torch.segment_reduce(values, "sum", lengths=lengths, initial=0).to(kind)
    return sums


def on_rows(values_B: Tensor, length_B: Tensor) -> Tensor:
    """Repeat each row's value for all of its tokens: [B] to [T]."""
    if values_B.device.type != "cpu" or values_B.requires_grad:
        return values_B.repeat_interleave(length_B)
    return _tensor(np.repeat(_array(values_B), length_B.numpy()), values_B.dtype)  # ten times faster


def last_true(mask_T: Tensor, length_B: Tensor) -> Tensor:
    """Position in [T] of each row's last true entry: int64 [B]; -1 where there is none."""
    last_B = length_B.cumsum(0) - 1
    found_B = torch.where(length_B > 0, last_B, -1)
    if len(mask_T):
        for row in ((length_B > 0) & ~mask_T[last_B.clamp(min=0)]).nonzero().flatten().tolist():
            end = int(last_B[row]) + 1
            places = mask_T[end - int(length_B[row]) : end].nonzero()
            found_B[row] = end - int(length_B[row]) + int(places[-1]) if len(places) else -1
    return found_B


def flat_blocks(length_B: Tensor) -> Iterator[tuple[slice, slice]]:
    """Neighbouring rows with few enough tokens that what is computed of them in between stays small: (rows, tokens).

    A batch of ten thousand long responses has float64 temporaries of gigabytes, and getting that memory from the
    system takes longer than the arithmetic.
    """
    ends, start = bounds(length_B), 0
    for row in range(1, len(ends)):
        if row == len(ends) - 1 or ends[row + 1] - ends[start] > _BLOCK:
            yield slice(start, row), slice(ends[start], ends[row])
            start = row


class Blocks:
    """The rows of columns [T] in padded blocks: of similar length, and few enough that a block stays small.

    for rows in blocks: values_bW = blocks.padded(values_T, rows) ...; blocks.put(target_T, rows, result_bW)
    """

    def __init__(self, length_B: Tensor, group_B: Tensor | None = None, entries: int | None = None) -> None:
        """Divide the rows into blocks.

        group_B: rows of a group are in one block.
        entries: size of a block, where no row or group alone has more.
        """
        self._ends, self._lengths = bounds(length_B), length_B.tolist()
        self._groups = range(len(length_B)) if group_B is None else group_B.tolist()
        self._entries = _BLOCK if entries is None else entries

    def __iter__(self) -> Iterator[list[int]]:
        """Positions of the rows of each block."""
        widest: dict[int, int] = {}
        members: dict[int, list[int]] = {}
        for row, (group, length) in enumerate(zip(self._groups, self._lengths, strict=True)):
            widest[group] = max(widest.get(group, 0), length)
            members.setdefault(group, []).append(row)
        block: list[int] = []
        for group in sorted(members, key=widest.__getitem__):
            if block and (len(block) + len(members[group])) * widest[group] > self._entries:
                yield block
                block = []
            block.extend(members[group])
        if block:
            yield block

    def padded(self, values_T: Tensor, rows: Sequence[int]) -> Tensor:
        """Pad these rows of a CPU column to [b, longest of them], with 0."""
        filled = torch.zeros(len(rows), max(self._lengths[row] for row in rows), dtype=values_T.dtype)
        target, source = _array(filled), _array(values_T)
        for place, row in enumerate(rows):
            target[place, : self._lengths[row]] = source[self._ends[row] : self._ends[row + 1]]
        return filled

    def put(self, target_T: Tensor, rows: Sequence[int], values_bW: Tensor) -> None:
        """Write a block back to its places."""
        target, source = _array(target_T), _array(values_bW.to(target_T.dtype))
        for place, row in enumerate(rows):
            target[self._ends[row] : self._ends[row + 1]] = source[place, : self._lengths[row]]


def plain(values: Tensor) -> Any:
    """A tensor in the form in which it is pickled: torch's own takes a third of a millisecond for each."""
    return Pickled(_array(values), values.dtype in _AS_INTEGERS) if values.device.type == "cpu" else values


def revived(given: Any) -> Any:
    """Inverse of `plain`; anything else is returned as it is. What shared memory holds is not copied."""
    if not isinstance(given, Pickled):
        return given
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nor does anybody write to a struct
        values = torch.from_numpy(given.values)
    return values.view(torch.bfloat16) if given.bits else values


def places(length_B: Tensor, width: int, side: Side, num_tokens: int | None = None) -> Tensor:
    """Compute where each token is in a flattened [B, width]: int64 [T].

    num_tokens: T; without it the call waits for the device.
    """
    row_T = torch.arange(len(length_B), device=length_B.device).repeat_interleave(length_B, output_size=num_tokens)
    first_B = length_B.cumsum(0) - length_B
    column_T = torch.arange(len(row_T), device=length_B.device) - first_B[row_T]
    return row_T * width + (column_T if side == "right" else column_T + (width - length_B)[row_T])


def _require_room(length_B: Tensor, width: int) -> None:
    if len(length_B) and int(length_B.max()) > width:
        raise ValueError(f"a padded column has {width} places in a row, but the longest row has {int(length_B.max())}")


def _array(values: Tensor) -> NDArray[Any]:
    values = values.detach()
    bits = _AS_INTEGERS.get(values.dtype)
    return (values if bits is None else values.view(bits)).numpy()


def _tensor(values: NDArray[Any], dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor.view(dtype) if dtype in _AS_INTEGERS else tensor
