"""YAML files of the user's that list tools, simulated users or agent loops."""

from __future__ import annotations

from typing import Any

from verl_like.text import one_line
from verl_like.user_code import UserCodeError, resolve_path


def load_yaml(path: str, key: str) -> Any:
    """Read a YAML file as OmegaConf does. Raises UserCodeError where it is missing or is not YAML."""
    from omegaconf import OmegaConf  # here: a run without such a file need not wait for it

    file = resolve_path(path, key)
    try:
        return OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except Exception as error:  # of the file system, of YAML, of OmegaConf
        raise UserCodeError(f"{key}={path} is not YAML: {one_line(error)}; correct it") from error
