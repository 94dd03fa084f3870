"""What a process publishes: spans with limits that follow the pace, readable from outside at any time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from verl_like import heartbeat
from verl_like.heartbeat import DRIVER, Beacon, read_beacon, stacks_below
from verl_like.services.pool import WorkerPool
from verl_like.services.service import ServiceSpec


@pytest.fixture
def beacon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Beacon:
    monkeypatch.setattr(heartbeat, "_WRITE_S", 0.0)
    return Beacon(tmp_path / "beacon", 100.0)


def seen(tmp_path: Path) -> list[dict[str, Any]]:
    found = read_beacon(tmp_path / "beacon")
    assert found is not None
    return found["spans"]


def test_a_limit_grows_with_the_work_and_with_the_slowest_pace(beacon: Beacon, tmp_path: Path) -> None:
    with beacon.span("update", 1, ""):
        for tokens, limit in (
            (100, 300.0),
            (200, 100.0),
        ):  # first of its kind; then by tokens, the slowest 0.1 s of 100
            with beacon.span("micro-batch", tokens, ""):
                (span,) = seen(tmp_path)
                assert span["in"] == ["update", "micro-batch"] and span["amount"] == tokens
                assert limit <= span["allowed_s"] < limit + (tokens == 200) * 8 + 1e-6
                time.sleep(0.1)
        assert span["allowed_s"] >= 102.0
        (span,) = seen(tmp_path)
        assert span["in"] == ["update"] and span["age_s"] < 0.1  # the end of a part is progress of the whole
    with beacon.span("writing", 5e9, "", 500.0):
        assert seen(tmp_path)[0]["allowed_s"] == 800.0
    with beacon.span("serving", 1, DRIVER):
        assert seen(tmp_path)[0]["allowed_s"] is None
    assert seen(tmp_path) == []


def test_the_first_one_of_its_kind_is_forgotten(beacon: Beacon, tmp_path: Path) -> None:
    """It compiles something; what counts is what comes after it."""
    for seconds in (0.5, 0.01, 0.0):
        with beacon.span("step", 1, ""):
            limit = seen(tmp_path)[0]["allowed_s"]
            time.sleep(seconds)
    assert 100.1 <= limit < 104


def test_parts_of_a_span_are_progress(beacon: Beacon, tmp_path: Path) -> None:
    with beacon.span("tensors", 1, ""):
        time.sleep(0.2)
        assert seen(tmp_path)[0]["age_s"] >= 0.2
        beacon.advance(4000)
        (span,) = seen(tmp_path)
        assert span["age_s"] < 0.1 and span["amount"] == 4000


def test_a_process_that_is_stuck_in_native_code_can_be_read(tmp_path: Path) -> None:
    """It holds the interpreter's lock for good: nothing of its own runs any more."""
    code = (
        "import ctypes, sys, pathlib\n"
        "from verl_like import heartbeat\n"
        "heartbeat.publish(pathlib.Path(sys.argv[1]), 5.0)\n"
        "with heartbeat.span('sync', amount=7, whom='rank 3'):\n"
        "    print('there', flush=True)\n"
        "    ctypes.PyDLL(None).pause()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "beacon")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        (span,) = seen(tmp_path)
        assert (span["in"], span["whom"], span["amount"], span["allowed_s"]) == (["sync"], "rank 3", 7, 15.0)
    finally:
        process.kill()
        process.communicate()
    assert read_beacon(tmp_path / "none") is None


def test_a_service_that_hangs_shows_where(tmp_path: Path) -> None:
    code = "import time\n\nclass Slow:\n    is_async = False\n    def call(self, payload):\n        time.sleep(60)\n"
    (tmp_path / "slow.py").write_text(code)
    pool = WorkerPool(ServiceSpec(factory=f"{tmp_path / 'slow.py'}:Slow", timeout=60.0), num_workers=1)
    try:
        pool.submit([1])
        text, deadline = "", time.monotonic() + 30
        while "in call" not in text:
            assert time.monotonic() < deadline, text
            text = "".join(stacks_below(os.getpid(), 0.2).values())
    finally:
        pool.close()
    assert f'File "{tmp_path}/slow.py", line 6 in call' in text
