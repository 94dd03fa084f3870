"""JSON messages over pipes, each after its length in 8 bytes."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

_LENGTH = 8


def send(descriptor: int, message: Any) -> None:
    """Write one message."""
    data = json.dumps(message).encode()
    view = memoryview(len(data).to_bytes(_LENGTH, "little") + data)
    while view:
        view = view[os.write(descriptor, view) :]


def receive(descriptor: int, deadline: float | None = None, most: int | None = None) -> Any:
    """The next message, or None at the end. TimeoutError after `deadline` (monotonic), ValueError over `most` bytes."""
    header = _read(descriptor, _LENGTH, deadline)
    if header is None:
        return None
    length = int.from_bytes(header, "little")
    if most is not None and length > most:
        raise ValueError(f"a message of {length} bytes, more than {most}")
    data = _read(descriptor, length, deadline)
    return None if data is None else json.loads(data)


def _read(descriptor: int, count: int, deadline: float | None) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("no message in time")
        part = os.read(descriptor, min(1 << 20, count - len(data)))
        if not part:
            return None
        data += part
    return bytes(data)
