"""What a Ray of a run says on the console."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import ray

from verl_like.cluster.launch import _quiet

DEATH = (
    "Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL by the user or system OOM "
    "killer. Last 20 lines of the Raylet logs:\n    [state-dump] NodeManager.deadline - 1 total\n    [state-dump] x\n"
)


def test_a_dying_daemon_says_one_line_and_its_state_goes_to_the_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = ray._private.worker  # type: ignore[attr-defined]
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)  # put back at the end
    for _ in range(2):  # also of a run that begins again
        with _quiet():
            pass
    with caplog.at_level(logging.DEBUG, "verl_like.cluster.launch"):
        worker.print_to_stdstream({"lines": [DEATH], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    told = capsys.readouterr().out
    assert "(1) SIGKILL by the user or system OOM killer." in told and told.count("\n") == 1
    assert "state-dump" not in told and "Last 20 lines" not in told and caplog.text.count("[state-dump]") == 2
    worker.print_to_stdstream({"lines": ["a\nb"], "pid": 7, "ip": "1", "is_err": False}, ignore_prefix=True)
    assert "b" in capsys.readouterr().out  # what users' code prints stays whole
