"""Deletes what a program left behind, whatever it did to make that hard."""

from __future__ import annotations

import math
import os
import time

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def empty_folder(folder: str, deadline: float = math.inf) -> None:
    """Delete all that is in `folder`.

    Raises OSError if that fails, TimeoutError (one of them) after `deadline` (monotonic).

    Nesting costs neither stack nor descriptors nor path length: one folder is open at a time, and `..` leads back.
    Nobody else may be at work in there.
    """
    os.chmod(folder, 0o700)
    current = os.open(folder, _FOLDER)
    try:
        above: list[str] = []  # the names that lead to `current`
        waiting = [_delete_files(current, deadline)]  # folders yet to be emptied, of each level
        while above or waiting[-1]:
            if waiting[-1]:
                above.append(waiting[-1].pop())
                os.chmod(above[-1], 0o700, dir_fd=current)  # it may be unreadable
                current = _move(current, above[-1])
                waiting.append(_delete_files(current, deadline))
            else:
                waiting.pop()
                current = _move(current, "..")
                os.rmdir(above.pop(), dir_fd=current)
    finally:
        os.close(current)


def _move(current: int, name: str) -> int:
    descriptor = os.open(name, _FOLDER, dir_fd=current)
    os.close(current)
    return descriptor


def _delete_files(folder: int, deadline: float) -> list[str]:
    """The names of the folders that are left."""
    folders = []
    for name in os.listdir(folder):
        if time.monotonic() >= deadline:
            raise TimeoutError("too much to delete")
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            folders.append(name)
    return folders
