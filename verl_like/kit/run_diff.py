"""Difference of two configurations, key by key: `verl-like diff`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_like.checkpoint.layout import find_latest
from verl_like.config import PPOConfig
from verl_like.config.errors import ConfigError
from verl_like.config.schema import to_dict
from verl_like.text import one_line
from verl_like.trainer.compose import compose_tree, to_config
from verl_like.trainer.resume import CONFIG_FILE

MISSING = "(not set)"


@dataclass(frozen=True, slots=True)
class Difference:
    """One key; default: None where this version has no such key."""

    key: str
    first: Any
    second: Any
    default: Any


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[Difference]:
    """Keys in the order of the configuration, those that this version does not know last."""
    defaults = dict(_leaves(to_dict(PPOConfig())))
    a, b = dict(_leaves(first)), dict(_leaves(second))
    found = []
    for key in dict.fromkeys([*defaults, *a, *b]):
        # a version that had no such key yet behaved as its default
        first_value, second_value = (values.get(key, defaults.get(key, MISSING)) for values in (a, b))
        if first_value != second_value:
            found.append(Difference(key, first_value, second_value, defaults.get(key)))
    return found


def read_configuration(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Read the configuration of a run's folder, a checkpoint or a YAML file; return its file too.

    Raises ConfigError where there is none.
    """
    path = Path(path).expanduser()
    if path.is_file():
        try:
            return path, to_dict(to_config(compose_tree([], [path])[0]))
        except ConfigError as error:
            raise ConfigError(
                [f"{path} is no configuration of a run: {problem}" for problem in error.problems]
            ) from error
    file = path / CONFIG_FILE
    if not file.exists() and path.is_dir() and (latest := find_latest(path)) is not None:
        file = latest / CONFIG_FILE  # the logs of this run are elsewhere (trainer.log_dir)
    if not file.exists():
        what = f"{path} holds no {CONFIG_FILE}" if path.is_dir() else f"{path.absolute()} does not exist"
        inside = sorted(each.parent for each in path.glob(f"*/{CONFIG_FILE}")) if path.is_dir() else []
        hint = f"; did you mean {inside[-1]}?" if inside else ""
        raise ConfigError([f"{what}: name a run's folder (trainer.log_dir), a checkpoint or a YAML file{hint}"])
    try:
        tree = OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:  # of the file system, of YAML, of OmegaConf
        raise ConfigError([f"{file} is damaged: {one_line(error)}"]) from error
    if not isinstance(tree, dict):
        raise ConfigError([f"{file} holds no keys"])
    return file, {str(name): value for name, value in tree.items()}


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; a dictionary without entries is a value."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif value != {}:  # an open dictionary that is empty here may have entries there
            yield prefix + str(name), value
