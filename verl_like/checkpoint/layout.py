"""Where checkpoints lie, which one a run resumes from, and which ones are deleted. Driver side, no torch.

    <default_local_dir>/
      latest_checkpointed_iteration.txt     number of the newest complete checkpoint; written last, atomically
      global_step_20/
        actor/    model/ optimizer/ extra/ [huggingface/]      written by TrainEngine.save
        critic/   the same, where there is a critic
        trainer_state.json                   step, sampler, KL coefficient: whatever the driver needs to go on

A crash while saving leaves a folder that the file does not name: it is ignored, and overwritten when its step comes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_like.config import TrainerConfig

log = logging.getLogger(__name__)

LATEST_FILE = "latest_checkpointed_iteration.txt"
STATE_FILE = "trainer_state.json"
ACTOR, CRITIC = "actor", "critic"
_STEP_DIR = re.compile(r"global_step_(\d+)")


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
    """An empty folder for the checkpoint of `step`. What an earlier run left there goes, its completeness first: a
    crash while saving must not leave a mixture of two checkpoints that looks whole."""
    path, marker = step_dir(root, step), Path(root) / LATEST_FILE
    if path.is_dir():
        if marker.exists() and marker.read_text().strip() == str(step):
            marker.unlink()
        (path / STATE_FILE).unlink(missing_ok=True)
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def write_latest(root: str | Path, step: int) -> None:
    """Declare the checkpoint of `step` complete: call it after everything else was written."""
    _write_atomically(Path(root) / LATEST_FILE, str(step))


def find_latest(root: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, or None when it has none. Raises ValueError when its folder is gone."""
    marker = Path(root) / LATEST_FILE
    if not marker.exists():
        return None
    path = step_dir(root, int(marker.read_text()))
    if not path.is_dir():
        raise ValueError(
            f"{marker} names step {step_of(path)}, but {path} does not exist: put the folder back, correct the file, "
            "or set trainer.resume_mode=disable"
        )
    return path


def resolve_resume(trainer: TrainerConfig) -> Path | None:
    """The checkpoint this run starts from, or None for a fresh start; ValueError when the one asked for is missing."""
    mode = str(trainer.resume_mode)
    if mode == "disable":
        return None
    if mode == "auto":
        return find_latest(Path(trainer.default_local_dir).expanduser())
    if not trainer.resume_from_path:
        raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path=<folder>/global_step_<number>")
    path = Path(trainer.resume_from_path).expanduser()
    step_of(path)
    if not (path / STATE_FILE).exists():
        raise ValueError(
            f"trainer.resume_from_path={str(path)!r} holds no {STATE_FILE}: it is not a complete checkpoint"
        )
    return path


def write_trainer_state(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write the driver's state (JSON values only) into a checkpoint folder."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    _write_atomically(folder / STATE_FILE, json.dumps(state, indent=2, allow_nan=False))


def read_trainer_state(path: str | Path) -> dict[str, Any]:
    """What `write_trainer_state` wrote."""
    return json.loads((Path(path) / STATE_FILE).read_text())


def rotate(root: str | Path, keep_actor: int | None, keep_critic: int | None) -> list[Path]:
    """Delete the oldest actor and critic folders beyond the numbers to keep (None keeps all); what was deleted.

    A step's folder goes when neither is left in it. The newest complete checkpoint is never touched; a folder that a
    crash left incomplete does not count among those to keep.
    """
    latest = find_latest(root)
    if latest is None:
        return []
    done = sorted((p for p in Path(root).iterdir() if _STEP_DIR.fullmatch(p.name)), key=step_of)
    done = [path for path in done if step_of(path) <= step_of(latest) and (path / STATE_FILE).exists()]
    deleted = []
    for role, keep in ((ACTOR, keep_actor), (CRITIC, keep_critic)):
        holders = [path for path in done if (path / role).is_dir()]
        for path in holders[: -max(1, keep)] if keep is not None else []:
            shutil.rmtree(path / role)
            deleted.append(path / role)
    for path in done:
        if path != latest and not any((path / role).is_dir() for role in (ACTOR, CRITIC)):
            shutil.rmtree(path)
            deleted.append(path)
    for path in deleted:
        log.info("deleted old checkpoint %s", path)
    return deleted


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
