"""Inventory of this machine: the parts it has for a run, and those it lacks (`verl-like doctor`)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement

from verl_like.config import RolloutConfig
from verl_like.config.engines import ENGINES
from verl_like.parallel.device_peak import data_sheet
from verl_like.plugins.code_grading.sandbox.probe import assess
from verl_like.plugins.code_grading.sandbox.settings import SandboxError, SandboxSettings
from verl_like.user_code import load

logger = logging.getLogger(__name__)

_EXTRAS = ("flash-attn", "liger-kernel", "wandb", "tensorboard")
_MIN_SHM = 2 * 2**30  # bytes: Ray's object store and the exchange between ranks; containers often get 64 MB
_MIN_FILES = 4096
_MIN_DISK = 10 * 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """Line of the report.

    missing: a run cannot do without it.
    warn: a run can do without it, but may fail or be slow.
    """

    section: str
    name: str
    text: str
    status: Literal["ok", "warn", "missing", "info"] = "ok"
    fix: str = ""


def examine(*, start_ray: bool = False) -> Iterator[Finding]:
    """Examine all parts of the machine, in the order in which they are shown.

    start_ray: start a Ray and stop it again (some 10 seconds).
    """
    yield from _versions()
    yield from _engines()
    yield from _devices()
    yield from _ray(start_ray)
    yield _sandbox()
    yield from _room()


def _versions() -> Iterator[Finding]:
    section = "versions"
    python = f"{platform.python_version()} at {sys.executable}"
    old = sys.version_info < (3, 11)
    yield Finding(section, "python", python, "missing" if old else "ok", "Python 3.11 or newer" if old else "")
    yield Finding(section, "system", f"{platform.platform()}, {platform.machine()}", "info")
    for requirement in _requirements():
        if requirement.marker is None:
            yield _version(section, requirement)


def _requirements() -> list[Requirement]:
    """List the requirements that verl_like declares; [] where it is used from a folder without being installed."""
    try:
        return [Requirement(text) for text in importlib.metadata.requires("verl_like") or ()]
    except importlib.metadata.PackageNotFoundError:
        return []


def _version(section: str, requirement: Requirement) -> Finding:
    found, wanted = installed(requirement.name), str(requirement.specifier)
    if found is None:
        return Finding(section, requirement.name, "not installed", "missing", f"pip install '{requirement}'")
    if not requirement.specifier.contains(found, prereleases=True):
        return Finding(section, requirement.name, f"{found}, outside {wanted}", "warn", f"pip install '{requirement}'")
    return Finding(section, requirement.name, found)


def installed(name: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _engines() -> Iterator[Finding]:
    section = "rollout"
    for engine, kind in ENGINES.items():
        found = next((f"{name} {version}" for name in kind.packages if (version := installed(name))), None)
        if found is None and kind.apart is not None:
            found = load(kind.apart, "rollout.name")()
        if found is not None:
            yield Finding(section, engine, found)
        elif engine == RolloutConfig().name:
            text = "not installed: rollout.name=hf is left, and slower"
            yield Finding(section, engine, text, "warn", kind.install)
        elif kind.install:
            yield Finding(section, engine, "not installed", "info", kind.install)
    for name in _EXTRAS:
        yield Finding("optional", name, installed(name) or "not installed", "ok" if installed(name) else "info")


def _devices() -> Iterator[Finding]:
    section = "devices"
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            name = torch.cuda.get_device_name(number)
            text = f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GB free, CUDA {torch.version.cuda}"
            busy = free < 0.9 * total
            yield Finding(section, f"cuda:{number}", text, "warn" if busy else "ok", "others use it" if busy else "")
            if data_sheet(name) is None:
                yield Finding(section, "", "its peak is not in the tables: it is measured at the start", "info")
    elif shutil.which("nvidia-smi"):
        fix = f"torch {torch.__version__} sees no device: install a CUDA build that fits the driver"
        yield Finding(section, "cuda", "nvidia-smi is there, but torch sees no GPU", "warn", fix)
    else:
        yield Finding(section, "cuda", "no GPU: everything runs on the CPU", "info")
    cores, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    bfloat16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    yield Finding(section, "cpu", f"{usable} of {cores} cores, {'with' if bfloat16 else 'no'} bfloat16 instructions")
    yield Finding(section, "memory", f"{available_memory() / 2**30:.1f} GB available", "info")


def available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _ray(start: bool) -> Iterator[Finding]:
    section = "Ray"
    if installed("ray") is None:
        return  # told among the versions
    if address := os.environ.get("RAY_ADDRESS"):
        fix = "ray_init.address=auto joins it; without that a run starts one of its own"
        yield Finding(section, "RAY_ADDRESS", address, "info", fix)
    if not start:
        yield Finding(section, "start", "not tried (--start-ray does)", "info")
        return
    from verl_like.cluster.launch import connect

    began = time.perf_counter()
    try:
        with connect(num_cpus=1):
            text = f"starts in {time.perf_counter() - began:.1f} s"
    except Exception as error:  # whatever it is, it is the answer
        logger.debug("Ray does not start", exc_info=True)
        fix = "trainer.launcher=local runs one rank without Ray"
        yield Finding(section, "start", f"{type(error).__name__}: {str(error).splitlines()[0]}", "missing", fix)
        return
    yield Finding(section, "start", text)


def _sandbox() -> Finding:
    """Examine the sandbox, which graders and tools run the model's code in."""
    try:
        found = assess(SandboxSettings())
    except (SandboxError, OSError) as error:
        return Finding("sandbox", "level", str(error).splitlines()[0], "warn", "see docs/security.md")
    if found.level == SandboxSettings().min_level:
        return Finding("sandbox", "level", found.summary())
    fix = "code rewards need reward_model.sandbox.min_level to accept this; see docs/security.md"
    return Finding("sandbox", "level", found.summary(), "warn", fix)


def _room() -> Iterator[Finding]:
    section = "room"
    shared = Path("/dev/shm")
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        little = usage.free < _MIN_SHM
        fix = "in a container: --shm-size=16g or --ipc=host" if little else ""
        text = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GB free"
        yield Finding(section, "/dev/shm", text, "warn" if little else "ok", fix)
    hub = os.environ.get("HF_HOME", "~/.cache/huggingface")
    for name, folder, fix in (
        ("temporary files", tempfile.gettempdir(), "TMPDIR"),
        ("model cache", hub, "HF_HOME"),
        ("this folder", ".", "trainer.default_local_dir"),
    ):
        path = Path(folder).expanduser().absolute()
        there = next(part for part in (path, *path.parents) if part.exists())
        free = shutil.disk_usage(there).free
        little = free < _MIN_DISK
        text = f"{path}: {free / 2**30:.1f} GB free"
        yield Finding(section, name, text, "warn" if little else "ok", f"set {fix} elsewhere" if little else "")
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files < _MIN_FILES
    yield Finding(section, "open files", f"{files:,}", "warn" if few else "ok", f"ulimit -n {most}" if few else "")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        yield Finding(section, "hub", "HF_HUB_OFFLINE is set: models must be in the cache or in folders", "info")
