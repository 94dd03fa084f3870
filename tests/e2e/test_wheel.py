"""The wheel: built from the files under version control, installed outside the repository, and used from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, tracked_files

pytestmark = pytest.mark.slow
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, where no build of another day lies about."""
    folder = tmp_path_factory.mktemp("wheel")
    for file in tracked_files():
        copy = folder / "source" / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    command = [
        *PIP,
        "wheel",
        str(folder / "source"),
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
    ]
    subprocess.run(command, check=True, timeout=300)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of its installation; what it needs comes from the Python that runs the tests."""
    prefix = tmp_path_factory.mktemp("prefix")
    install = ["install", "--no-deps", "--no-index", "--ignore-installed", "--prefix", str(prefix), str(wheel)]
    subprocess.run([*PIP, *install], check=True, timeout=300)
    return prefix


def run(prefix: Path, folder: Path, *command: str, timeout: float = 240) -> str:
    """What a command of the installation says in a folder elsewhere."""
    (packages,) = prefix.glob("lib/python3*/site-packages")
    environment = os.environ | {"PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
    words = [str(prefix / "bin" / command[0]) if command[0] == "verl-like" else command[0], *command[1:]]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_file_of_the_package_is_in_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {path.relative_to(ROOT).as_posix() for path in tracked_files() if path.is_relative_to(ROOT / "verl_like")}
    assert ours <= names, f"[tool.setuptools.package-data] leaves out {sorted(ours - names)}"
    others = {name for name in names - ours if not name.startswith("verl_like-")}
    assert not others, f"what is this? {sorted(others)}"


def test_its_metadata_say_what_a_reader_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    for line in ("License-Expression: Apache-2.0", "Description-Content-Type: text/markdown", "Provides-Extra: mlflow"):
        assert line in text


def test_it_works_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    where = run(installed, tmp_path, sys.executable, "-c", "import verl_like; print(verl_like.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    assert "quickstart" in run(installed, tmp_path, "verl-like", "--help")
    assert "verl_like" in run(installed, tmp_path, "verl-like", "doctor")
    assert "clip_ratio_high: 0.28" in run(installed, tmp_path, "verl-like", "train", "--cfg", "job", "preset=dapo")


def test_its_quickstart_trains(installed: Path, tmp_path: Path) -> None:
    """One step, through Ray; the script is that of the wheel."""
    code = "from verl_like.kit.verbs.quickstart import script; print(script())"
    assert Path(run(installed, tmp_path, sys.executable, "-c", code).strip()).is_relative_to(installed)
    said = run(installed, tmp_path, "verl-like", "quickstart", "--rollout", "hf", "trainer.total_training_steps=1")
    assert "step   1 (GRPO)" in said and (tmp_path / "outputs/quickstart/checkpoints/report.html").is_file()
