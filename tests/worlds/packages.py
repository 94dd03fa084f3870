"""Packages of others that a test fetches for itself: nothing of ours is pinned by what they pin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# What pip is asked for, without what it needs: the rest is there, or comes with the list
TINKER = [
    *("tinker-cookbook==0.6.1", "tinker==0.38.0", "chz==0.4.0", "blobfile==3.3.0", "termcolor==3.3.0"),
    *("distro", "sniffio", "orjson"),
]
TINKER_CLIENT = [
    *TINKER,
    "pyqwest==0.12.0",
    "zstandard==0.25.0",
    "h2",
    "hpack",
    "hyperframe",
    "lxml",
    "tml-renderers==0.2.1",
]
PEFT = ["peft==0.21.2", "accelerate"]
DATASETS = ["datasets==5.2.0", "xxhash", "dill", "multiprocess", "pyarrow-hotfix"]


def fetch(folder: Path, packages: list[str]) -> None:
    """Install packages into a folder; the test is skipped where pip cannot get them."""
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "1", "--timeout", "10"]
    run = subprocess.run([*line, "--target", str(folder), *packages], capture_output=True, text=True, timeout=240)
    if run.returncode != 0:
        pytest.skip(f"pip cannot fetch {packages[0]}: {run.stderr.strip()[-200:]}")
