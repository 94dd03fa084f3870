"""verl's own files, out of its wheels and unedited."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

VERSIONS = ("0.5.0", "0.7.0", "0.9.1")


@pytest.fixture(scope="session")
def wheels(request: pytest.FixtureRequest) -> dict[str, Path]:
    """verl's wheels by version, kept in pytest's cache; the tests are skipped where pip cannot fetch them."""
    assert request.config.cache is not None
    folder = request.config.cache.mkdir("verl_wheels")
    line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    line += ["--retries", "1", "--timeout", "10", "--dest", str(folder)]
    runs = {
        version: subprocess.Popen([*line, f"verl=={version}"], stderr=subprocess.PIPE, text=True)
        for version in VERSIONS
        if not any(folder.glob(f"verl-{version}-*.whl"))
    }
    for version, run in runs.items():
        try:
            _, errors = run.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            run.kill()
            errors = "no answer within 60 s"
        if run.returncode != 0:
            pytest.skip(f"pip cannot fetch verl {version}: {errors.strip()[-300:]}")
    return {version: next(folder.glob(f"verl-{version}-*.whl")) for version in VERSIONS}


@pytest.fixture
def unpack(wheels: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put single files of a wheel, by their paths below `verl`, where a worker finds them: beside the stand-ins, or in
    place of them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(version: str, *files: str) -> None:
        with zipfile.ZipFile(wheels[version]) as wheel:
            for file in files:
                wheel.extract(f"verl/{file}", tmp_path)

    return put
