"""Many tensors in one piece of memory: what is sent at once between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; a view as another type needs a multiple of its size


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a bucket. first: its first byte."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    first: int

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.first + self.shape.numel() * self.dtype.itemsize


def room_for(shapes: Iterable[torch.Size], dtype: torch.dtype) -> int:
    """Bytes of a bucket that takes them all."""
    return sum(_aligned(shape.numel() * dtype.itemsize) for shape in shapes)


def filled(
    stream: Iterable[tuple[str, Tensor]], room: int, memory: Callable[[int], Tensor], *, whole: bool
) -> Iterator[tuple[list[Entry], Tensor]]:
    """The tensors of `stream` in buckets of `room` bytes, one after the other: what is in each, and its bytes.

    memory: gives at least so many bytes, which may be those of an earlier bucket. A tensor that needs more than `room`
    is alone in a bucket; with `whole` those are its own bytes, and nothing is copied.
    """
    entries: list[Entry] = []
    bucket = torch.empty(0, dtype=torch.uint8)
    for name, tensor in stream:
        size, first = tensor.numel() * tensor.element_size(), _aligned(entries[-1].end) if entries else 0
        if entries and first + size > room:
            yield entries, bucket[: entries[-1].end]
            entries, first = [], 0
        entry = Entry(name, tensor.dtype, tensor.shape, first)
        if whole and size > room:
            yield [entry], _bytes(tensor)
        else:
            if not entries:
                bucket = memory(max(room, size))
            bucket[entry.first : entry.end].copy_(_bytes(tensor))
            entries.append(entry)
        del tensor
    if entries:
        yield entries, bucket[: entries[-1].end]


def taken_out(entries: list[Entry], bucket: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket: views of its bytes. Raises ValueError for one that is not all there."""
    for entry in entries:
        if entry.end > bucket.numel():
            raise ValueError(f"a bucket of {bucket.numel()} bytes ends before {entry.name}, which ends at {entry.end}")
        yield entry.name, bucket[entry.first : entry.end].view(entry.dtype).view(entry.shape)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
