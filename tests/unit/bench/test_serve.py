"""The server's own bench runs whole, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bench.tiny import bench, use_tiny_shapes


def test_three_ways_do_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiny_shapes(monkeypatch)
    small = ["--clients", "3", "--rows", "2", "--length", "8", "--tokens", "3", "--rank", "2", "--rounds", "1"]
    report = bench(tmp_path / "serve.json", "serve", *small, "--", "trainer.device=cpu")
    assert [row.name for row in report.rows] == ["one client", "3 clients, shared", "3 clients, exact"]
    assert all(row.seconds and row.figures["tokens/s"] * row.seconds == 6 * (8 + 3) for row in report.rows)
    assert report.figures["of_one"] > 0 and "of one client's throughput" in report.notes[1]
