"""Files that are there whole or not at all, and folders that can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step: whoever reads it, also after a kill, sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def require_writable(key: str, folder: str | Path, *, make: bool = True) -> None:
    """Make the folder that a key names. ValueError, naming both, where nothing can be written into it.

    make: False leaves no folder behind and tries the nearest one above that is there.
    """
    path = Path(folder).expanduser()
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path = next(part for part in (path, *path.absolute().parents) if part.exists())
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        in_the_way = next((part for part in (path, *path.parents) if part.exists() and not part.is_dir()), None)
        reason = error.strerror or str(error) if in_the_way is None else f"{in_the_way} is a file, not a folder"
        raise ValueError(
            f"{key}={str(folder)!r}: nothing can be written there ({reason}); name a folder that this user may write to"
        ) from error
