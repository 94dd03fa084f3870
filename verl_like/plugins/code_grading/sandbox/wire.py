"""Messages to and from programs that nobody trusts: JSON over pipes, each behind its length in 8 bytes.

Python's plain values keep their types (`encode`, `decode`), and everything else stays there, behind an opaque handle.
Decoding makes plain values only, of exactly the built-in types: nothing that arrives can bring behaviour with it.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable
from typing import Any

_LENGTH = 8
Give = Callable[[Any], Any]


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


class Opaque:
    """A value that stays in the other process. Equal to nothing but itself."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"<a value that is not plain data, number {self.number}>"


class Handles:
    """The values behind the handles that were given out."""

    def __init__(self) -> None:
        self._values: list[Any] = []

    def give(self, value: Any) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def take(self, number: int) -> Any:
        return self._values[number]


def encode(value: Any, give: Give | None = None) -> Any:
    """A JSON value. Raises TypeError for what is no plain data, unless `give` turns it into a handle."""
    if value is None or isinstance(value, bool | str):
        return value if not isinstance(value, str) else str.__str__(value)
    if isinstance(value, int):
        return {"i": int.__repr__(value)} if abs(int(value)) >= 1 << 53 else int(value)
    if isinstance(value, float):
        return {"f": float.__repr__(value)}
    if isinstance(value, complex):
        return {"c": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"b": bytes(value).hex()}
    if isinstance(value, list):
        return [encode(item, give) for item in value]
    for tag, kind in (("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, kind):
            return {tag: [encode(item, give) for item in value]}
    if isinstance(value, dict):
        return {"d": [[encode(key, give), encode(item, give)] for key, item in value.items()]}
    if isinstance(value, Opaque):
        return {"h": value.number}
    if give is None:
        raise TypeError(f"{type(value).__name__} is not plain data")
    return {"h": give(value)}


def decode(value: Any, take: Give | None = None) -> Any:
    """Inverse of `encode`; handles become Opaque, or what `take` gives for their number. Raises ValueError for junk."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, list):
        return [decode(item, take) for item in value]
    if isinstance(value, dict) and len(value) == 1:
        ((tag, content),) = value.items()
        if tag in _DECODERS:
            return _DECODERS[tag](content, take)
    raise ValueError(f"not a value: {str(value)[:80]}")


def _items(content: Any, take: Give | None) -> list[Any]:
    return [decode(item, take) for item in content]


_DECODERS: dict[str, Callable[[Any, Give | None], Any]] = {
    "i": lambda content, take: int(str(content)[:4000]),
    "f": lambda content, take: float(content),
    "c": lambda content, take: complex(float(content[0]), float(content[1])),
    "b": lambda content, take: bytes.fromhex(content),
    "t": lambda content, take: tuple(_items(content, take)),
    "s": lambda content, take: set(_items(content, take)),
    "z": lambda content, take: frozenset(_items(content, take)),
    "d": lambda content, take: {decode(key, take): decode(item, take) for key, item in content},
    "h": lambda content, take: Opaque(int(content)) if take is None else take(int(content)),
}
