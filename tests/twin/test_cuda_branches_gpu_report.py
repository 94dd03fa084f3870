"""What `make gpu-report` runs on a card, run without one at tiny sizes; dry_run.py names what is left out, and why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.twin.dry_run_list import SUITES
from tests.twin.inner import TIMEOUT_S, lines_of, run_inside

pytestmark = [pytest.mark.twin, pytest.mark.timeout(TIMEOUT_S)]


def test_the_tests_of_one_device_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    _run("one", lines_of(tmp_path_factory))


def test_the_tests_of_two_devices_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Weights by CUDA handles between processes, and by NCCL's way over gloo."""
    _run("two", lines_of(tmp_path_factory))


def _run(name: str, lines: Path) -> None:
    suite = SUITES[name]
    output = run_inside("-m", "gpu", *(f"tests/gpu/{file}" for file in suite.files), devices=suite.devices, lines=lines)
    found = re.search(r"(\d+) passed", output)
    assert found and int(found[1]) >= suite.at_least, output
