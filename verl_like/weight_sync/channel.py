"""Channels that weights travel on: the two ends of a channel, and the channel within one process.

in process  header and stream are handed over as they are: a tensor is gathered when the loader asks for it
ipc         one receiver on the same machine; two buckets that both processes see (ipc.py)
broadcast   receivers anywhere, in a process group that they form with the sender (broadcast.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl_like.weight_sync.header import Header

Stream = Iterator[tuple[str, Tensor]]
DEADLINE_S = 600.0


class ChannelError(RuntimeError):
    """A transfer that broke off: which side waited for whom, and how many tensors had travelled. The channel between
    processes is closed then, and is to be set up anew."""


class SendingEnd(Protocol):
    """On every rank of the trainer; where only one of them speaks to receivers, on the others too (`TakesPart`)."""

    def send(self, header: Header, stream: Stream) -> None:
        """Send one update; returns when all receivers have taken it. Reads `stream`, a collective of the trainer, to
        its end unless it raises. Raises ChannelError, or what the stream raises, of which receivers are told."""
        ...

    def fail(self, reason: str) -> None:
        """In place of `send`: receivers get a ChannelError with this reason instead of a header."""
        ...

    def close(self) -> None:
        """Free what the channel holds."""
        ...


class ReceivingEnd(Protocol):
    """On every rank that receives."""

    def receive(self) -> tuple[Header, Stream]:
        """Wait for the next update. Raises ChannelError, as the stream does; read the stream to its end."""
        ...

    def fail(self, reason: str) -> None:
        """In place of reading the stream: the sender gets a ChannelError with this reason."""
        ...

    def close(self) -> None:
        """Free what the channel holds."""
        ...


class InProcess:
    """Both ends for trainer and engine in one process: `receive` after `send`."""

    def __init__(self) -> None:
        self._sent: tuple[Header, Stream] | ChannelError | None = None

    def send(self, header: Header, stream: Stream) -> None:
        """Keep header and stream for `receive`; returns at once."""
        self._sent = header, stream

    def fail(self, reason: str) -> None:
        """Keep the reason for `receive`, which raises ChannelError; a receiver that fails has nobody to tell."""
        self._sent = ChannelError(reason)

    def receive(self) -> tuple[Header, Stream]:
        """Hand over the header and the stream that were sent. Raises ChannelError with the reason given to `fail`."""
        sent, self._sent = self._sent, None
        assert sent is not None, "received before anything was sent"
        if isinstance(sent, ChannelError):
            raise sent
        return sent

    def close(self) -> None:
        """There is nothing to free."""
        self._sent = None


class TakesPart:
    """The sending end of a trainer's rank that speaks to no receiver: it takes part in the gathers."""

    def send(self, header: Header, stream: Stream) -> None:
        """Read the stream to its end: its gathers are collective."""
        for _ in stream:
            pass

    def fail(self, reason: str) -> None:
        """Another rank tells it."""

    def close(self) -> None:
        """There is nothing to free."""


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
