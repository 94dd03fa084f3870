"""Twenty kinds of requests that no client of good will sends, for `verl-like bench gateway`: a process of its own.

    python -m verl_like.kit.bench.hostile '["127.0.0.1", 8000, "sk-...", 12.0]'

Each kind is sent twice, all at the same time, over raw sockets to this machine alone, and waits so many seconds for its
answer at most. Printed, as JSON: of each kind, the statuses that came back; 0 for a connection closed without one, -1
for one that was still open at the end.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

_COPIES, _MIB, _LARGE = 2, 1 << 20, 64 << 20
Parts = Iterable[bytes | float]  # what is sent; numbers are pauses in seconds


def kinds(key: str) -> dict[str, Parts]:
    """Build the bytes to send for each kind of request.

    key: API key of an open session.
    """

    def post(body: bytes, headers: str = "", *, key: str = key, length: int | None = None) -> bytes:
        size = f"Content-Length: {len(body) if length is None else length}"
        size = size if "Transfer" not in headers else "X-No: length"
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n{size}\r\n{headers}\r\n"
        )
        return head.encode() + body

    def chat(content: str = "t8", **more: object) -> bytes:
        return json.dumps({"messages": [{"role": "user", "content": content}], **more}).encode()

    def repeated(first: bytes, *parts: bytes | float, count: int) -> Iterator[bytes | float]:
        return itertools.chain([first], itertools.islice(itertools.cycle(parts), count * len(parts)))

    zeros, packed = gzip.compress(bytes(256 * _MIB), 9), "Content-Encoding: gzip\r\n"
    chunked = post(b"", "Transfer-Encoding: chunked\r\n")
    tool = {"type": "function", "function": {"name": "f", "description": "t9 " * 1000}}
    return {
        "10 MB of tools": [post(chat(tools=[tool] * 3400))],
        "a million empty messages": [post(chat(messages=[{"role": "user", "content": ""}] * 10**6))],
        "2 MB of empty lists": [post(b'{"messages": [' + b"[]," * 700_000 + b"[]]}")],
        "a text of 2 MB": [post(chat("t9 " * 700_000))],
        "100,000 brackets deep": [post(b"[" * 100_000)],
        "a number of a million digits": [post(b'{"seed": ' + b"9" * _MIB + b"}")],
        "a key a hundred thousand times": [post(b'{"n": 1' + b',"n": 1' * 100_000 + b"}")],
        "no number": [post(b'{"messages": [], "seed": NaN}')],
        "bytes that are no text": [post(b'{"messages": "\xff\xfe"}')],
        "wrong types": [post(chat(messages={"a": [1]}, tools=5))],
        "gzip without a key": [post(zeros, packed, key="sk-guess")],
        "gzip": [post(zeros, packed)],
        "64 MB": repeated(post(b"", length=_LARGE), bytes(_MIB), count=64),
        "64 MB without a key": repeated(post(b"", key="sk-guess", length=_LARGE), bytes(_MIB), count=64),
        "chunks without end": repeated(chunked, b"100000\r\n" + bytes(_MIB) + b"\r\n", count=64),
        "chunks of one byte": repeated(chunked, b"1\r\nx\r\n" * 10_000, count=400),
        "a body that drips": repeated(post(b"", length=1000), b"x", 0.5, count=1000),
        "headers that drip": repeated(b"POST / HTTP/1.1\r\n", b"x-a: b\r\n", 0.5, count=1000),
        "half a request": [b"POST /v1/chat/comp"],
        "10,000 headers": [post(b"{}", "".join(f"x-{number}: y\r\n" for number in range(10_000)))],
        "a header of 1 MB": [post(b"{}", "x-a: " + "y" * _MIB + "\r\n")],
        "a thousand requests in one go": [post(b"{") * 1000],
    }


async def _send(place: tuple[str, int], parts: Parts, wait_s: float) -> int:
    reader, writer = await asyncio.open_connection(*place)

    async def send() -> None:
        with suppress(ConnectionError):
            for part in parts:
                if isinstance(part, bytes):
                    writer.write(part)
                    await writer.drain()
                else:
                    await asyncio.sleep(part)

    sending = asyncio.ensure_future(send())
    try:
        line = await asyncio.wait_for(reader.readline(), wait_s)
        return int(line.split()[1]) if line else 0
    except TimeoutError:
        return -1
    except ConnectionError:
        return 0
    finally:
        sending.cancel()
        writer.close()


async def _main(host: str, port: int, key: str, wait_s: float) -> dict[str, list[int]]:
    copies = [kinds(key) for _ in range(_COPIES)]
    sent = [_send((host, port), parts, wait_s) for copy in copies for parts in copy.values()]
    statuses = await asyncio.gather(*sent)
    return {kind: list(statuses[place :: len(copies[0])]) for place, kind in enumerate(copies[0])}


if __name__ == "__main__":
    os.nice(10)  # as if it were on another machine: what it computes itself is nobody's stall
    print(json.dumps(asyncio.run(_main(*json.loads(sys.argv[1])))))
