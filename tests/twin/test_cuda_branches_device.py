"""Figures, profiles, streams of threads, checks of a start and engines' sleep on cuda:0 with the CPU's arithmetic."""

from __future__ import annotations

import pytest

from tests.twin.inner import TIMEOUT_S, lines_of, run_inside

pytestmark = [pytest.mark.twin, pytest.mark.timeout(TIMEOUT_S)]


def test_the_cases_hold_inside(tmp_path_factory: pytest.TempPathFactory) -> None:
    run_inside("tests/twin/inside/device_cases.py", lines=lines_of(tmp_path_factory))
