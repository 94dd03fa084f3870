"""Files that are there whole or not at all, links, and folders that can be written."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

# What a run appends to or writes over in its folder; checkpoints are renamed into their place.
_WRITTEN = (
    "*.log", "*.jsonl", "*_run_id", "global_step_*", "workers", "workers/*", "samples", "samples/*", "samples/*/*",
)  # fmt: skip
_FILES = ("verl_like.log", "metrics.jsonl", "*_run_id", "latest_checkpointed_iteration.txt", "best_checkpoint.json")
_FOLDERS = ("samples", "workers", *(f"global_step_*[0-9]{end}" for end in ("", ".saving", ".replaced", ".deleted")))


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step: whoever reads it, also after a kill, sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def remove(path: Path) -> None:
    """Delete a folder; of a link to one, the link alone: what it points to was put elsewhere by somebody."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def linked_folders(key: str, folder: Path) -> list[str]:
    """List a line for each folder in a run's folder, and below, that is a link: files go to the place it points to.

    Raises ValueError, naming `key`, for a link to a file: a run would write outside of what it was given; and for a
    folder or a pipe in place of a file, or the other way round, which a run would find at its first save.
    """
    for patterns, is_one, what in ((_FILES, Path.is_file, "file"), (_FOLDERS, Path.is_dir, "folder")):
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            if path.exists() and not is_one(path):
                raise ValueError(f"{key}={str(folder)!r}: {path} is no {what}, and a run keeps one there. Remove it")
    told = []
    for path in (path for pattern in _WRITTEN for path in sorted(folder.glob(pattern))):
        if path.is_symlink() and path.is_dir():
            told.append(f"{path} is a link: what belongs there goes to {path.resolve()}")
        elif path.is_symlink():
            raise ValueError(
                f"{key}={str(folder)!r}: {path} is a link to {os.readlink(path)}, but a run writes into its own "
                "folders alone. Remove the link, or name another folder; folders in it may be links"
            )
    return told


def require_writable(key: str, folder: str | Path, *, make: bool = True) -> None:
    """Make the folder that a key names. Raises ValueError, naming both, where nothing can be written into it.

    make: False leaves no folder behind and tries the nearest one above that is there.
    """
    if not str(folder).strip() or "://" in str(folder):
        raise ValueError(f"{key}={str(folder)!r}: name a folder of this machine")
    path = Path(folder).expanduser()
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path = next(part for part in (path, *path.absolute().parents) if part.exists())
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(2**20))  # less than any checkpoint: a full disk shows
    except OSError as error:
        in_the_way = next((part for part in (path, *path.parents) if part.exists() and not part.is_dir()), None)
        reason = error.strerror or str(error) if in_the_way is None else f"{in_the_way} is a file, not a folder"
        raise ValueError(
            f"{key}={str(folder)!r}: nothing can be written there ({reason}); name a folder that this user may write to"
        ) from error
