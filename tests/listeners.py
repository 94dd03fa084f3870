"""Which addresses processes listen on, as Linux tells."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which one of these processes waits for connections."""
    found: dict[str, tuple[str, int]] = {}
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in (Path("/proc/net") / file).read_text().splitlines()[1:]:
            local, state, inode = (line.split()[i] for i in (1, 3, 9))
            if state == "0A":
                words, port = local.split(":")
                raw = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
                found[f"socket:[{inode}]"] = (socket.inet_ntop(family, raw), int(port, 16))
    open_files: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # it was closed meanwhile
                    open_files.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {place for name, place in found.items() if name in open_files}


def with_descendants(pid: int) -> set[int]:
    """This process and all that it started, and those started."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family, before = {pid}, 0
    while len(family) > before:
        before = len(family)
        family |= {child for child, parent in parents.items() if parent in family}
    return family


def strangers(pid: int) -> set[tuple[str, int]]:
    """Where a process or its descendants listen to more than this machine."""
    here = ("127.", "::1", "::ffff:127.")
    return {place for place in listening(with_descendants(pid)) if not place[0].startswith(here)}
