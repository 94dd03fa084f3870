"""`verl-like doctor`: what is there is told, and what is missing sets the exit status."""

from __future__ import annotations

import collections
import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_like.cli.main import main
from verl_like.plugins.code_grading.sandbox import client
from verl_like.plugins.code_grading.sandbox.settings import SandboxError

Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room everywhere, whatever machine the tests run on."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 0, 2**40))


def test_everything_is_told(plenty: None, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    told = capsys.readouterr().out
    for name in ("python", "torch", "ray", "vllm", "cpu", "memory", "level", "/dev/shm", "open files"):
        assert f"\n  {name:<16} " in told or f"\n! {name:<16} " in told, name
    assert torch.__version__.partition("+")[0] in told and "not tried (--start-ray does)" in told


def test_what_a_run_cannot_be_without_sets_the_status(
    plenty: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "hydra-core":
            raise importlib.metadata.PackageNotFoundError(name)
        return "4.0" if name == "transformers" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    told = capsys.readouterr().out
    assert ended.value.code == 1
    assert "x hydra-core: not installed -> pip install 'hydra-core" in told
    assert "! transformers: 4.0, outside <6,>=5.16 -> pip install 'transformers" in told


def test_a_small_container_and_no_sandbox_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def usage(path: Any) -> Usage:
        free = 64 * 2**20 if str(path) == "/dev/shm" else 2**40
        return Usage(free, 0, free)

    def broken(*_: Any, **__: Any) -> None:
        raise SandboxError("no user namespaces here")

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(client.Jail, "__init__", broken)
    if not Path("/dev/shm").is_dir():
        pytest.skip("no shared memory folder on this system")
    main(["doctor"])
    told = capsys.readouterr().out
    assert "/dev/shm: 0.1 of 0.1 GB free -> in a container: --shm-size=16g or --ipc=host" in told
    assert "! level: no user namespaces here -> see docs/security.md" in told
