"""trainer.profile_tool=nsys: refused where it cannot record, and the command lines it makes (a stand-in takes them)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_like.config import PPOConfig
from verl_like.trainer.compose import compose
from verl_like.trainer.nsight import check_nsight, worker_runtime_env

STAND_IN = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != "{python}" ]; do shift; done
exec "$@"
"""
SCRIPT = """
from pathlib import Path
from verl_like.trainer.compose import compose
from verl_like.trainer.nsight import restart_under_nsight
config = compose({overrides!r})
restart_under_nsight(config, Path({folder!r}))
print("inside")
"""
WANTED = [
    "data.train_files=x.parquet",
    "trainer.profile_steps=[2]",
    "trainer.profile_tool=nsys",
    "trainer.val_only=False",
]


@pytest.fixture
def config() -> PPOConfig:
    return compose([*WANTED, "trainer.device=cuda"])


def test_off_without_steps(config: PPOConfig) -> None:
    plain = compose(["data.train_files=x.parquet", "trainer.profile_tool=nsys"])
    check_nsight(plain, "cpu")
    assert worker_runtime_env(plain, Path("/p")) is None


def test_refused_on_a_cpu_and_without_the_program(config: PPOConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"trainer\.device=cpu.*profile_tool=torch"):
        check_nsight(config, "cpu")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="no program nsys"):
        check_nsight(config, "cuda")


def test_workers_get_the_options_that_have_a_value(config: PPOConfig) -> None:
    environment = worker_runtime_env(config, Path("/out/profile"))
    assert environment is not None
    options = environment["nsight"]
    assert options["capture-range"] == "cudaProfilerApi" and options["o"] == "/out/profile/worker_%p"
    assert "capture-range-end" not in options


def test_the_driver_starts_itself_again_once(tmp_path: Path) -> None:
    """The stand-in records its arguments and runs what follows them, as nsys does."""
    program, log = tmp_path / "nsys", tmp_path / "calls.txt"
    program.write_text(STAND_IN.format(log=log, python=sys.executable))
    program.chmod(0o755)
    script = tmp_path / "main.py"
    script.write_text(SCRIPT.format(overrides=[*WANTED, "trainer.device=cuda"], folder=str(tmp_path / "profile")))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == ["inside"]
    (call,) = log.read_text().splitlines()
    assert call.startswith("profile --trace=cuda,nvtx,cublas,ucx --cuda-memory-usage=true --cuda-graph-trace=graph")
    assert call.endswith(f"--output={tmp_path}/profile/controller {sys.executable} {script}")
