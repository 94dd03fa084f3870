"""Profiles by Nsight Systems of the driver and its workers: trainer.profile_tool=nsys.

Workers are started under `nsys profile` by Ray and record between torch.cuda.profiler.start and stop, that is in the
steps of trainer.profile_steps. The driver starts its own command again under `nsys profile`.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_like.config import PPOConfig
from verl_like.config.trainer import Launcher, ProfileTool

logger = logging.getLogger(__name__)

_ALREADY = "VERL_LIKE_UNDER_NSYS"


def wants_nsight(config: PPOConfig) -> bool:
    """True where this run records anything with Nsight Systems."""
    return bool(config.trainer.profile_steps) and config.trainer.profile_tool == ProfileTool.nsys


def check_nsight(config: PPOConfig, device: str) -> None:
    """Check that Nsight Systems, where it is asked for, can record; raises ValueError otherwise."""
    if not wants_nsight(config):
        return
    if device != "cuda" or config.trainer.launcher == Launcher.local:
        raise ValueError(
            f"trainer.profile_tool=nsys records CUDA in worker processes, but this run has trainer.device={device} and "
            f"trainer.launcher={config.trainer.launcher}; set trainer.profile_tool=torch"
        )
    if shutil.which("nsys") is None:
        raise ValueError(
            "trainer.profile_tool=nsys, but there is no program nsys on the PATH; install Nsight Systems or set "
            "trainer.profile_tool=torch"
        )


def worker_runtime_env(config: PPOConfig, folder: Path) -> dict[str, Any] | None:
    """Options with which Ray starts each worker under Nsight Systems; reports are <folder>/worker_<pid>.nsys-rep."""
    if not wants_nsight(config):
        return None
    options = given(config.trainer.worker_nsight_options)
    return {"nsight": {**options, "o": str(folder / "worker_%p")}}


def restart_under_nsight(config: PPOConfig, folder: Path) -> None:
    """Replace this process by the same command under `nsys profile`; returns when it is there already."""
    if not wants_nsight(config) or os.environ.get(_ALREADY):
        return
    folder.mkdir(parents=True, exist_ok=True)
    options = [f"--{name}={value}" for name, value in given(config.trainer.controller_nsight_options).items()]
    command = ["nsys", "profile", *options, "--force-overwrite=true", f"--output={folder / 'controller'}"]
    logger.info("profiling the driver: %s", " ".join(command))
    os.environ[_ALREADY] = "1"
    os.execvp("nsys", [*command, sys.executable, *sys.orig_argv[1:]])


def given(options: Mapping[str, Any]) -> dict[str, str]:
    """Select the options that have a value."""
    return {name: str(value) for name, value in options.items() if value is not None}
