"""Folders for the temporary files of processes that may be killed, and the removal of those that a killed trainer left.

A folder is locked (flock) as long as the process that made it lives, so that the next one, in whatever container or on
whatever machine that sees the same place, can tell which are left over.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "verl_like_reward_"
_NEW_S = 60.0  # between making a folder and locking it


class TempFolder:
    """A new folder below the system's temporary one."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._descriptor = os.open(self.path, os.O_RDONLY)  # closed in children
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


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
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder.name)
        except BlockingIOError:  # in use
            continue
        finally:
            os.close(descriptor)
    return removed
