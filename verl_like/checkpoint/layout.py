"""Layout of checkpoints: their folders, the one a run resumes from, and those to delete. Driver side, no torch.

    <default_local_dir>/
      latest_checkpointed_iteration.txt     number of the newest complete checkpoint; written last, atomically
      global_step_20/
        actor/    model/ optimizer/ extra/ huggingface/        written by FSDPEngine.save
        critic/   the same, where there is a critic
        config.yaml                          the run's resolved configuration
        trainer_state.json                   step, sampler, KL coefficient: whatever the driver needs to go on
        checksums.json                       size and CRC-32 of every file

A checkpoint is written under another name and renamed when it is whole (`prepare_step_dir`, `commit`); what a kill
leaves between two of these steps is finished or removed by `recover` when the next run starts. So there is no moment in
which a whole checkpoint that was there cannot be found, not even when one of the same step is written again.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from verl_like.checkpoint.checksums import CHECKSUMS_FILE
from verl_like.checkpoint.files import remove, write_atomically
from verl_like.small_files import Form, read_object, read_text

log = logging.getLogger(__name__)

LATEST_FILE = "latest_checkpointed_iteration.txt"
STATE_FILE = "trainer_state.json"
ACTOR, CRITIC = "actor", "critic"
_STEP_DIR = re.compile(r"global_step_(0|[1-9][0-9]{0,17})")  # as `step_dir` writes it: one folder a step
# Behind the name of a folder that is none (any more)
_SUFFIXES = _SAVING, _REPLACED, _DELETED = (".saving", ".replaced", ".deleted")

FindFaults = Callable[[Path], list[str]]


def step_dir(root: str | Path, step: int) -> Path:
    """Folder of one checkpoint."""
    return Path(root) / f"global_step_{step}"


def step_of(path: str | Path) -> int:
    """Training step of a checkpoint folder, from its name. Raises ValueError for another name."""
    match = _STEP_DIR.fullmatch(Path(path).name)
    if match is None:
        raise ValueError(f"{str(path)!r} is not a checkpoint folder: its name must be global_step_<number>")
    return int(match[1])


def prepare_step_dir(root: str | Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into; an older one of that step stays until `commit`."""
    path = _renamed(step_dir(root, step), _SAVING)
    if path.is_dir():
        remove(path)
    path.mkdir(parents=True)
    return path


def commit(written: str | Path) -> Path:
    """Give a folder of `prepare_step_dir`, now whole, its name, and declare it the newest checkpoint."""
    written = Path(written)
    path = written.with_name(written.name.removesuffix(_SAVING))
    replaced = _renamed(path, _REPLACED)
    if path.is_dir() or path.is_symlink():
        path.rename(replaced)
    written.rename(path)
    write_atomically(path.parent / LATEST_FILE, str(step_of(path)))
    if replaced.is_dir() or replaced.is_symlink():
        remove(replaced)
    return path


def recover(root: str | Path) -> None:
    """Finish or undo what a killed run left half done: renames of `commit`, unfinished saves and deletions."""
    root = Path(root)
    if not root.is_dir():
        return
    for path in root.glob(f"global_step_*{_SAVING}"):  # before the replaced ones: a whole new one takes the name
        final = path.with_name(path.name.removesuffix(_SAVING))
        if (path / CHECKSUMS_FILE).exists() and not final.exists():
            path.rename(final)
            # The marker stays: the step's validation and metrics are missing, so a resume does it again.
            log.warning("%s was written whole before its run was killed: it is kept, but not resumed from", final)
        else:
            remove(path)
    for path in root.glob(f"global_step_*{_REPLACED}"):
        final = path.with_name(path.name.removesuffix(_REPLACED))
        if final.exists():
            remove(path)
        else:
            path.rename(final)
    for path in [*root.glob(f"global_step_*{_DELETED}"), *root.glob(f"global_step_*/*{_DELETED}")]:
        remove(path)
    for path in root.glob(f".{LATEST_FILE}.*"):
        path.unlink()


def find_latest(root: str | Path, find_faults: FindFaults = lambda path: []) -> Path | None:
    """Find the newest whole checkpoint of a run; None when the run has none.

    That is the one which the marker file names, also by hand. Where there is no such file, where it cannot be read, or
    where its checkpoint is faulty, the newest whole one counts (first of those before it), and a warning says so.
    Raises ValueError when there are checkpoints, but none is whole.

    find_faults: function that lists the faults of a complete checkpoint's files.
    """
    root, marker = Path(root), Path(root) / LATEST_FILE
    if not root.is_dir():
        return None
    try:
        text, unread = read_text(marker, 99).strip(), ""
    except (FileNotFoundError, ValueError) as error:
        text, unread = None, f"{marker} is missing" if isinstance(error, FileNotFoundError) else str(error)
    marked = int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None
    folders = step_dirs(root)
    named = [] if marked is None else [step_dir(root, marked)]
    others = [path for path in reversed(folders) if path not in named]
    faults: list[str] = []
    if marked is None and (folders or text is not None):
        faults.append(unread or f"{marker} holds {text!r}, not a step")
    for path in root.glob(f"global_step_*/{STATE_FILE}"):
        if _STEP_DIR.fullmatch(path.parent.name) is None and path.parent.suffix not in _SUFFIXES:
            log.warning("%s is left out: a checkpoint's folder is called global_step_<number>", path.parent)
    for path in [*named, *others]:
        found = _incomplete(path) or _state_faults(path) or find_faults(path)
        if not found:
            if faults:
                log.warning("%s. Resuming from %s, the newest whole checkpoint", "; ".join(faults), path)
            elif newer := [step_of(p) for p in folders if step_of(p) > step_of(path) and not _incomplete(p)]:
                log.warning(
                    "%s names step %d, though step %d is whole: delete that file to go on from the newest",
                    *(marker, step_of(path), newer[-1]),
                )
            return path
        faults += found
    if marked is not None or any(not _incomplete(path) for path in folders):
        raise ValueError(
            f"no checkpoint in trainer.default_local_dir={str(root)!r} is whole: {'; '.join(faults)}. Put the files "
            "back, or start afresh: trainer.resume_mode=disable, or another trainer.default_local_dir"
        )
    if faults:
        log.warning("%s: no whole checkpoint in %s, the run starts at step 0", "; ".join(faults), root)
    return None


def forget(path: Path) -> None:
    """Delete a checkpoint, and name the newest whole one that is left, or none."""
    remove(path)
    left = [step_of(other) for other in step_dirs(path.parent) if not _incomplete(other)]
    marker = path.parent / LATEST_FILE
    if left:
        write_atomically(marker, str(left[-1]))
    else:
        marker.unlink(missing_ok=True)


def whole_checkpoints(root: str | Path) -> list[Path]:
    """The checkpoints that were written to their end, oldest step first."""
    return [path for path in step_dirs(Path(root)) if not _incomplete(path)]


def check_checkpoint(path: str | Path, find_faults: FindFaults = lambda path: []) -> Path:
    """The folder that trainer.resume_from_path names. Raises ValueError unless it is a whole checkpoint."""
    folder = Path(path).expanduser()
    named = [] if _STEP_DIR.fullmatch(folder.name) else ["its name must be global_step_<number>"]
    faults = _incomplete(folder) + named or _state_faults(folder) or find_faults(folder)
    if faults:
        raise ValueError(f"trainer.resume_from_path={str(path)!r} is not a whole checkpoint: {'; '.join(faults)}")
    return folder


def write_trainer_state(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write the driver's state (JSON values only) into a checkpoint folder."""
    write_atomically(Path(path) / STATE_FILE, json.dumps(state, indent=2, allow_nan=False))


def read_trainer_state(path: str | Path, form: Form | None = None) -> dict[str, Any]:
    """Return what `write_trainer_state` wrote. Raises ValueError, naming the file, where it is damaged."""
    return read_object(Path(path) / STATE_FILE, form, strict=True)


def rotate(latest: Path, keep_actor: int | None, keep_critic: int | None, spared: Collection[Path] = ()) -> list[Path]:
    """Delete the oldest actor and critic folders beyond the numbers to keep (None keeps all); what was deleted.

    A step's folder goes when neither is left in it. `latest`, the newest complete checkpoint, and the spared ones are
    never touched, and these do not count among those to keep; nor does one that a crash left incomplete.
    """
    done = [path for path in step_dirs(latest.parent) if step_of(path) <= step_of(latest) and not _incomplete(path)]
    done = [path for path in done if path not in spared or path == latest]
    kept = {path: {role for role in (ACTOR, CRITIC) if (path / role).is_dir()} for path in done}
    deleted = []
    for role, keep in ((ACTOR, keep_actor), (CRITIC, keep_critic)):
        holders = [path for path in done if role in kept[path]]
        for path in holders[: -max(1, keep)] if keep is not None else []:
            kept[path].discard(role)
            deleted.append(path / role)
    empty = [path for path in done if path != latest and not kept[path]]
    deleted = [*(path for path in deleted if path.parent not in empty), *empty]
    for path in deleted:
        gone = _renamed(path, _DELETED)  # first: a folder that is half deleted must not look like a checkpoint
        path.rename(gone)
        linked = f": a link to {os.readlink(gone)}, which stays" if gone.is_symlink() else ""
        remove(gone)
        log.info("deleted old checkpoint %s%s", path, linked)
    return deleted


def step_dirs(root: Path) -> list[Path]:
    """The folders named global_step_<number>, oldest step first."""
    there = root.iterdir() if root.is_dir() else ()
    return sorted((path for path in there if _STEP_DIR.fullmatch(path.name) and path.is_dir()), key=step_of)


def _incomplete(path: Path) -> list[str]:
    if not path.is_dir():
        return [f"{path.absolute()} {'is a file' if path.exists() else 'does not exist'}"]
    verl = " (or verl wrote it: trainer.resume_from_path takes it up)" if (path / "data.pt").exists() else ""
    whole = (path / STATE_FILE).exists()
    return [] if whole else [f"{path} holds no {STATE_FILE}: it was not written to its end{verl}"]


def _state_faults(path: Path) -> list[str]:
    try:
        read_trainer_state(path)
    except ValueError as error:
        return [str(error)]
    return []


def _renamed(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
