"""The driver's own work, measured on a small batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.bench.tiny import bench
from verl_like.kit.bench.driver import ESTIMATORS, response_lengths
from verl_like.kit.bench.report import Report

SMALL = ("--prompts", "8", "--n", "4", "--mean", "20", "--longest", "40", "--rounds", "1")


def test_every_phase_is_measured_and_a_missed_bar_is_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(tmp_path / "driver.json", "driver", *SMALL, "--most-copies", "0.001")
    assert ended.value.code == 1 and capsys.readouterr().out.endswith("verdict: MISSED\n")
    report = Report.load(tmp_path / "driver.json")
    names = {row.name for row in report.rows}
    assert {"receive", "assemble", "scores", "old log-probs", "update", "reporting", "whole step"} <= names
    assert {f"make_experience {name}" for name in ESTIMATORS} <= names
    parts = ("receive", "assemble", "scores", "old log-probs", "make_experience grpo", "update", "reporting")
    assert report.row("whole step").seconds == pytest.approx(sum(report.row(name).seconds or 0 for name in parts))
    assert report.figures["copies"] > 0 and report.row("whole step").figures["copies"] == report.figures["copies"]


def test_lengths_are_long_tailed() -> None:
    lengths = response_lengths(4000, 200, 4096)
    assert 0.95 < sum(lengths) / len(lengths) / 200 < 1.05 and max(lengths) > 1000 and min(lengths) >= 1
    assert max(response_lengths(4000, 200, 300)) == 300


def test_memory_of_a_phase_is_what_it_adds() -> None:
    """In a process of its own: here memory that other tests gave back may serve."""
    program = """if True:
        from verl_like.kit.bench.driver import Phases
        phases = Phases()
        phases.run("large", lambda: bytearray(64 * 2**20))
        print(phases.peak_bytes["large"])"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    peak = int(run.stdout)
    assert peak in range(60 * 2**20, 80 * 2**20) or peak == 0  # not Linux
