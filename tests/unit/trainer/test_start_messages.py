"""What a start says of its phases: seconds, and the CPU seconds of all its processes."""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import sys

import pytest

from verl_like.gc_settings import settle, starting
from verl_like.trainer import start_messages

# A grandchild burns 0.3 s of CPU, and ends when it is told to. In a process of its own: nobody else's children end.
_FAMILY = """
import subprocess, sys
from verl_like.trainer.start_messages import cpu_seconds
burn = "import time\\nwhile time.process_time() < 0.3: pass\\nprint(flush=True)\\ninput()"
script = f"import subprocess, sys\\nsubprocess.run([sys.executable, '-c', {burn!r}])"
before = cpu_seconds()
child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
running = cpu_seconds()
child.communicate(b"\\n")
print(running - before, cpu_seconds() - before)
"""


def test_a_phase_tells_its_seconds_and_those_of_cpu(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, cpu = iter([10.0, 14.25]), iter([3.0, 9.5])
    monkeypatch.setattr(start_messages.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(start_messages, "cpu_seconds", lambda: next(cpu))
    with caplog.at_level(logging.INFO, logger=start_messages.__name__), start_messages.start_phase("Ray"):
        pass
    assert caplog.messages == ["start: Ray ...", "start: Ray took 4.2 s, 6.5 s of CPU"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpu_seconds_are_those_of_all_processes_below_also_of_ended_ones() -> None:
    done = subprocess.run([sys.executable, "-c", _FAMILY], capture_output=True, text=True, check=True)
    running, ended = map(float, done.stdout.split())
    assert 0.27 <= running < 2.0 and running - 0.05 <= ended < running + 1.0  # the kernel counts in hundredths


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_age_of_a_process_counts_from_its_start() -> None:
    script = (
        "import time\ntime.sleep(0.5)\nfrom verl_like.trainer.start_messages import process_age\nprint(process_age())"
    )
    age = float(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert 0.5 <= age < 120


def test_of_each_part_of_the_workers_start_the_slowest_rank_is_told() -> None:
    ranks = [{"imports": (6.0, 4.94), "actor": (0.2, 0.2)}, {"imports": (5.0, 4.99), "rollout": (12.0, 11.0)}]
    assert start_messages.worker_start_text(ranks) == (
        "imports 6.0 s (4.9 s of CPU), actor 0.2 s (0.2 s of CPU), rollout 12.0 s (11.0 s of CPU)"
    )


def test_the_whole_wait_stands_beside_what_it_would_be_at_best() -> None:
    assert (
        start_messages.ready_text(18.8, 28.84, 2)
        == "start: ready after 18.8 s; 28.8 s of CPU, on 2 core(s) 14.4 s at best"
    )
    assert re.search(r"on 1 core\(s\) 3.0 s", start_messages.ready_text(4, 3, 1))


def test_pythons_own_thresholds_come_back_after_a_start() -> None:
    own = gc.get_threshold()
    with starting():
        assert gc.get_threshold()[0] >= 1_000_000 and gc.isenabled()
        undo = settle(seldom=False)  # an engine in this process: what holds a device's memory must go soon
        assert gc.get_threshold() == own
        undo()
    assert gc.get_threshold() == own


def test_objects_stay_exempt_where_they_were() -> None:
    gc.freeze()  # as tests/conftest.py
    try:
        before = gc.get_freeze_count()
        settle(seldom=True)()
        assert gc.get_freeze_count() == before > 10_000
        gc.unfreeze()
        undo = settle(seldom=True)
        assert gc.get_freeze_count() > 10_000
        undo()
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
