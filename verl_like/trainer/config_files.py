"""YAML files of the configuration: ours, verl's own by name, and where --config-name points."""

from __future__ import annotations

import re
from pathlib import Path

from verl_like.config.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parent / "config"
CONFIG_NAME = "ppo_trainer"
ENTRIES = (CONFIG_NAME, "ppo_megatron_trainer")  # verl's own files, whose keys have the defaults of ours
_SAYS_MORE = re.compile("(fully_async|one_step_off)_(ppo|ppo_megatron|dapo)_trainer")


def entry_file(name: str) -> Path | None:
    """Find what verl's own file of this name says, where that is more than defaults of ours; None for other names."""
    of = _SAYS_MORE.fullmatch(name.removesuffix(".yaml"))
    return CONFIG_DIR / f"{of[1]}_ppo_trainer.yaml" if of else None


def yaml_path(folder: Path, name: str) -> Path:
    """Find the file that --config-name means. Raises ConfigError where there is none."""
    path = with_suffix(folder.expanduser() / name)
    if not path.is_file():
        raise ConfigError([f"--config-name={name}: there is no file {path.absolute()}"])
    return path


def with_suffix(path: Path) -> Path:
    """Add .yaml to a path, unless it has that or .yml."""
    return path if path.suffix in (".yaml", ".yml") else path.with_name(path.name + ".yaml")
