"""Folders for a run's files. Two runs never share a folder: one that does not resume goes beside what another left."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from verl_like.checkpoint.files import linked_folders, require_writable
from verl_like.config import PPOConfig, RayInitConfig
from verl_like.config.errors import problems_of
from verl_like.remote_storage import RemoteFolder

logger = logging.getLogger(__name__)

_TEMP_DIR_CHARS = 40  # what Ray adds is named by date and process, below 67 characters


def check_output_folders(config: PPOConfig, *, make: bool = True) -> Iterator[str]:
    """Check that the folders of the run's output can be made and written, and make them."""
    trainer, ray = config.trainer, config.ray_init if config.trainer.launcher == "ray" else RayInitConfig()
    timeline = ray.timeline_json_file
    for key, folder in (
        ("ray_init.temp_dir", ray.temp_dir),
        (f"ray_init.timeline_json_file={timeline}, folder", timeline and str(Path(timeline).parent)),
        ("trainer.default_local_dir", trainer.default_local_dir),
        ("trainer.log_dir", trainer.log_dir),
        ("trainer.rollout_data_dir", trainer.rollout_data_dir),
        ("trainer.validation_data_dir", trainer.validation_data_dir),
        ("env.render_save_dir", config.env.render_save_dir),
    ):
        if folder is not None:
            yield from problems_of(partial(require_writable, key, folder, make=make))
            linked_folders(key, Path(folder).expanduser())
    if timeline is not None and (not timeline.strip() or Path(timeline).is_dir()):
        yield f"ray_init.timeline_json_file={timeline!r}: name a file in a folder of this machine"
    if trainer.default_hdfs_dir is not None:
        yield from problems_of(partial(RemoteFolder, trainer.default_hdfs_dir, "trainer.default_hdfs_dir"))
    if ray.temp_dir is not None and len(str(Path(ray.temp_dir).resolve())) > _TEMP_DIR_CHARS:
        yield (
            f"ray_init.temp_dir={ray.temp_dir}: Ray puts sockets below it, whose paths may have 107 characters; "
            f"shorten it to {_TEMP_DIR_CHARS}"
        )


def log_dir(config: PPOConfig) -> Path:
    """Folder of metrics, logs and the resolved configuration."""
    return Path(config.trainer.log_dir or config.trainer.default_local_dir).expanduser()


def profile_dir(config: PPOConfig) -> Path:
    """Folder of the traces of trainer.profile_steps."""
    return log_dir(config).resolve() / "profile"


def with_free_folder(config: PPOConfig) -> PPOConfig:
    """Move the run's folder to `<folder>-2` (-3 ...) where it holds another run's files.

    The folder is trainer.default_local_dir, with those below it; folders of samples elsewhere get the same ending.

    resume_mode=auto resumes from a checkpoint in the folder, else from the first of `<folder>-2`, -3 ... that has one:
    a job that is started again and again finds its own. A folder in which nothing was trained yet is taken as it is.
    """
    mode, root = str(config.trainer.resume_mode), Path(config.trainer.default_local_dir).expanduser()
    own = Path(config.trainer.resume_from_path or root).expanduser().resolve().is_relative_to(root.resolve())
    if (mode == "resume_path" and own) or not _holds_run(root) or (mode == "auto" and _holds_checkpoint(root)):
        return config
    beside = (root.with_name(f"{root.name}-{number}") for number in itertools.count(2))
    folder = next(path for path in beside if not _holds_run(path) or (mode == "auto" and _holds_checkpoint(path)))
    _say(root, folder, mode)
    settings = config.trainer
    moved = {}
    for name, value in (
        ("default_local_dir", settings.default_local_dir),
        ("log_dir", settings.log_dir),
        ("rollout_data_dir", settings.rollout_data_dir),
        ("validation_data_dir", settings.validation_data_dir),
    ):
        path = Path(value or "").expanduser()
        if value is not None and path.is_relative_to(root):
            moved[name] = str(folder / path.relative_to(root))
        elif value is not None and name != "log_dir":  # there the earlier run's files are set aside
            moved[name] = str(path.with_name(path.name + folder.name.removeprefix(root.name)))
    return replace(config, trainer=replace(settings, **moved))


def _say(root: Path, folder: Path, mode: str) -> None:
    if _holds_run(folder):
        logger.warning("%s holds another run's files and no checkpoint: this run resumes in %s", root, folder)
        return
    reasons = {"auto": "no checkpoint of it to resume from", "resume_path": "this run resumes from another folder"}
    why = reasons.get(mode, f"trainer.resume_mode={mode}")
    logger.warning("%s holds another run's files (%s): this run's go to %s", root, why, folder)


def _holds_run(root: Path) -> bool:
    """True for steps that were reported, or checkpoints.

    The rest of a failed start (a log, a lock) may be written over.
    """
    metrics = root / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or _holds_checkpoint(root)


def _holds_checkpoint(root: Path) -> bool:
    """True for any checkpoint, also one that is not whole: `find_resume` says what becomes of it."""
    return any(path.suffix not in (".saving", ".deleted") for path in root.glob("global_step_*"))
