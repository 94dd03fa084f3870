"""Messages between a pool and one of its workers: pickles over a socket, each behind a mark and its length.

The worker's end is open in a process that runs users' code, which may write anything into it, or half of something. So
the pool never waits for the rest of a message, nor for a worker to read one, and takes nothing for a message that does
not start with the mark.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

_MARK = b"\xb7vl\x1e"
_HEAD = struct.Struct("<4sQ")
_MOST_BYTES = 1 << 28
_PART_BYTES, _MOST_PARTS = 1 << 18, 64


class BrokenChannelError(Exception):
    """Error of a channel that delivered bytes which are no message."""


class Channel:
    """End of a channel. The worker's blocks (`send`, `receive`); the pool's does not (`post`, `flush`, `arrived`)."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._arrived = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    @property
    def closed(self) -> bool:
        return self._end.fileno() < 0

    def send(self, message: Any) -> None:
        """Write one message, and wait until it is written."""
        self._end.sendall(_frame(message))

    def receive(self) -> Any:
        """Wait for the next message. EOFError at the end."""
        _, length = _HEAD.unpack(self._read(_HEAD.size))
        return pickle.loads(self._read(length))

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._end.recv(min(_PART_BYTES, count - len(data)))
            if not part:
                raise EOFError("the pool has closed the channel")
            data += part
        return bytes(data)

    def post(self, message: Any) -> None:
        """Write what there is room for of a message; `flush` writes the rest.

        Raises OSError if the other end is gone.
        """
        self._outgoing += _frame(message)
        self.flush()

    @property
    def unsent(self) -> bool:
        """True where bytes wait for `flush` to send them."""
        return bool(self._outgoing)

    def flush(self) -> None:
        """Write what there is room for. Raises OSError if the other end is gone."""
        while self._outgoing:
            try:
                sent = self._end.send(memoryview(self._outgoing)[:_PART_BYTES], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            del self._outgoing[:sent]

    def arrived(self) -> Iterator[Any]:
        """The messages that have arrived whole, then EOFError at the end, or BrokenChannelError if there is something
        else: what came before it counts."""
        part = b"more"
        for _ in range(_MOST_PARTS):  # there may be no end of it
            try:
                part = self._end.recv(_PART_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:  # it ended with something unread; what it wrote before counts
                part = b""
            if not part:
                break
            self._arrived += part
        empty = True
        while (message := self._next()) is not None:
            empty = False
            yield message[0]
        if not part and empty:
            raise EOFError("the worker has closed the channel")

    def _next(self) -> tuple[Any] | None:
        if not _MARK.startswith(self._arrived[: len(_MARK)]):
            raise BrokenChannelError(f"it wrote {bytes(self._arrived[:40])!r}")
        if len(self._arrived) < _HEAD.size:
            return None
        _, length = _HEAD.unpack_from(self._arrived)
        if length > _MOST_BYTES:
            raise BrokenChannelError(f"it announced a message of {length} bytes")
        end = _HEAD.size + length
        if len(self._arrived) < end:
            return None
        data = bytes(self._arrived[_HEAD.size : end])
        del self._arrived[:end]
        try:
            return (pickle.loads(data),)
        except Exception as error:
            raise BrokenChannelError(f"it wrote a message that cannot be read: {error!r}") from error


def _frame(message: Any) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(_MARK, len(data)) + data
