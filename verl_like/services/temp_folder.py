"""Folders for the temporary files of processes that may be killed, and the removal of those that a killed trainer left.

A folder is locked (flock) as long as the process that made it lives, so that the next one, in whatever container or on
whatever machine that sees the same place, can tell which are left over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path

from verl_like.services.cleaning import empty_folder

_PREFIX = "verl_like_service_"
_PATIENCE_S = 30.0
_NEW_S = 60.0  # between making a folder and locking it


class TempFolder:
    """A new folder below the system's temporary one."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._descriptor = os.open(self.path, os.O_RDONLY)  # closed in children
        with contextlib.suppress(OSError):  # a file system without locks: it may only be removed as it ends
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        delete(self.path)
        os.close(self._descriptor)


def delete(folder: str | Path) -> None:
    """Delete a folder and all in it, whatever stands there. What cannot be deleted is left to the next clean-up."""
    with contextlib.suppress(OSError):  # also one that is gone already
        empty_folder(str(folder), time.monotonic() + _PATIENCE_S)
        os.rmdir(folder)


def remove_leftovers(parent: str | None = None) -> list[str]:
    """Remove folders that nobody holds any more; returns their names."""
    removed = []
    for folder in Path(parent or tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's, or removed meanwhile
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(descriptor).st_mtime > _NEW_S:
                delete(folder)
                removed.append(folder.name)
        except OSError:  # in use, or on a file system without locks
            continue
        finally:
            os.close(descriptor)
    return removed
