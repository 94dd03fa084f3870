"""`verl-like quickstart`: a tiny model learns additions with GRPO; no download. From a clone or an installed wheel."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from pathlib import Path

from verl_like.config.engines import OURS
from verl_like.config.errors import ConfigError

_SCRIPT = "quickstart/run.py"  # in recipes/ of a clone; a wheel installs that folder below share/verl_like


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the recipe's own script."""
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/quickstart"), help="(outputs/quickstart)")
    parser.add_argument("--seed", type=int, default=1, help="of data, model and run (1)")
    parser.add_argument("--rollout", choices=["auto", *OURS], default="auto", help="auto: vllm if installed")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further keys of train")


def run(arguments: argparse.Namespace) -> None:
    """Prepare, train, tell what came out: the script takes this process's place, so that signals reach it."""
    options = ["--output-dir", str(arguments.output_dir), "--seed", str(arguments.seed)]
    command = [sys.executable, str(script()), *options, "--rollout", arguments.rollout, *arguments.overrides]
    os.execv(sys.executable, command)


def script() -> Path:
    """The recipe's script. Raises ConfigError where neither clone nor wheel brought it along."""
    clone = Path(__file__).resolve().parents[3] / "recipes" / _SCRIPT
    if clone.is_file():
        return clone
    try:
        files = importlib.metadata.files("verl_like") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        found = Path(str(file.locate())).resolve()
        if file.as_posix().endswith(_SCRIPT) and found.is_file():
            return found
    raise ConfigError(["the quickstart's files are not there: install verl_like from its wheel, or run it in a clone"])
