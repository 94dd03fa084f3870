"""Folders of a run's output."""

from __future__ import annotations

from pathlib import Path

from verl_like.checkpoint.files import linked_folders, require_writable
from verl_like.config import PPOConfig, RayInitConfig
from verl_like.remote_storage import RemoteFolder

_TEMP_DIR_CHARS = 40  # what Ray adds is named by date and process, below 67 characters


def check_output_folders(config: PPOConfig, *, make: bool = True) -> None:
    """Check that the folders of the run's output can be made and written.

    Raises ValueError, naming the key, otherwise.
    """
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
            require_writable(key, folder, make=make)
            linked_folders(key, Path(folder).expanduser())
    if timeline is not None and (not timeline.strip() or Path(timeline).is_dir()):
        raise ValueError(f"ray_init.timeline_json_file={timeline!r}: name a file in a folder of this machine")
    if trainer.default_hdfs_dir is not None:
        RemoteFolder(trainer.default_hdfs_dir, "trainer.default_hdfs_dir")
    if ray.temp_dir is not None and len(str(Path(ray.temp_dir).resolve())) > _TEMP_DIR_CHARS:
        raise ValueError(
            f"ray_init.temp_dir={ray.temp_dir}: Ray puts sockets below it, whose paths may have 107 characters; "
            f"shorten it to {_TEMP_DIR_CHARS}"
        )


def log_dir(config: PPOConfig) -> Path:
    """Folder of metrics, logs and the resolved configuration."""
    return Path(config.trainer.log_dir or config.trainer.default_local_dir).expanduser()


def profile_dir(config: PPOConfig) -> Path:
    """Folder of the traces of trainer.profile_steps."""
    return log_dir(config).resolve() / "profile"
