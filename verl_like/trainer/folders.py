"""Where a run's files go."""

from __future__ import annotations

from pathlib import Path

from verl_like.checkpoint.files import linked_folders, require_writable
from verl_like.config import PPOConfig


def check_output_folders(config: PPOConfig, *, make: bool = True) -> None:
    """ValueError, naming the key, for a folder of the run's output that cannot be made or written."""
    trainer = config.trainer
    for key, folder in (
        ("trainer.default_local_dir", trainer.default_local_dir),
        ("trainer.log_dir", trainer.log_dir),
        ("trainer.rollout_data_dir", trainer.rollout_data_dir),
        ("trainer.validation_data_dir", trainer.validation_data_dir),
    ):
        if folder is not None:
            require_writable(key, folder, make=make)
            linked_folders(key, Path(folder).expanduser())


def log_dir(config: PPOConfig) -> Path:
    """Folder of metrics, logs and the resolved configuration."""
    return Path(config.trainer.log_dir or config.trainer.default_local_dir).expanduser()


def profile_dir(config: PPOConfig) -> Path:
    """Folder of the traces of trainer.profile_steps."""
    return log_dir(config).resolve() / "profile"
