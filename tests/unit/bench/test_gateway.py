"""The gateway's own cost: the bench runs whole, small, and says when a session's tokens are not one row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.bench.tiny import bench
from verl_like.plugins.agents.gateway.session import Session


def test_every_request_is_answered_and_counted(tmp_path: Path) -> None:
    report = bench(tmp_path / "gateway.json", "gateway", "--sessions", "8", "--turns", "2", "--hostile-s", "1")
    assert 0 < report.figures["overhead_ms"] < 100 and report.work["sessions"] == 8
    assert "16 requests of 8 sessions at once" in report.notes[0]
    assert 0 < report.figures["stall_s"] < 5 and 0 < report.figures["above_idle_mb"] < 400
    statuses = report.figures["hostile"]
    assert (
        len(statuses) >= 20
        and statuses["gzip without a key"] == [401, 401]
        and statuses["10 MB of tools"][0] in (413, -1)
    )


def test_lost_tokens_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Session.turns
    monkeypatch.setattr(Session, "turns", lambda self: turns(self)[1:])
    with pytest.raises(SystemExit, match="RuntimeError: a session has 32 tokens"):
        bench(tmp_path / "gateway.json", "gateway", "--sessions", "2", "--turns", "2", "--hostile-s", "1")
