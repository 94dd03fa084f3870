"""However the driver ends, no process, shared memory or session folder of its run stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_like.cluster.janitor import kill_processes, processes_of_run

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and /dev/shm"),
]

ROOT = Path(__file__).parents[3]


class Driver:
    """driver_script.py as a process group of its own, as a terminal would start it."""

    def __init__(self, log_dir: Path) -> None:
        command = [sys.executable, "-m", "tests.unit.cluster.driver_script", str(log_dir)]
        self.errors = (log_dir / "driver.err").open("w+")
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "HOME": str(log_dir)},
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )
        words = self._line().split()
        assert words[:1] == ["run"], self.stderr()
        self.run_id, self.pids = words[1], [int(word) for word in words[2:]]
        assert len(self.leftovers()) > 4  # the check below can see Ray, workers, shared memory and session folder

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def stderr(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def leftovers(self) -> list[str]:
        places = (Path("/dev/shm"), Path("/tmp"))
        files = [str(entry) for place in places for entry in place.glob(f"*{self.run_id}*")]
        alive = [pid for pid in self.pids if Path(f"/proc/{pid}").exists()]
        return files + [f"process {pid}" for pid in {*alive, *processes_of_run(self.run_id)}]

    def wait_until_clean(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    started = Driver(tmp_path)
    yield started
    started.process.kill()
    started.process.wait()
    kill_processes(processes_of_run(started.run_id))


def test_ctrl_c_saves_and_leaves(driver: Driver) -> None:
    os.killpg(driver.process.pid, signal.SIGINT)  # what a terminal does: every process of the group gets it
    out, _ = driver.process.communicate(timeout=40)
    assert "saved: [2, 3]" in out, driver.stderr()
    assert driver.process.returncode == 0
    driver.wait_until_clean(2)


@pytest.mark.slow
def test_sigterm_to_all_processes_saves_and_leaves(driver: Driver) -> None:
    """What Slurm and containers do: workers, Ray's daemons and janitors get it too."""
    for pid in {driver.process.pid, *processes_of_run(driver.run_id)}:
        os.kill(pid, signal.SIGTERM)
    out, _ = driver.process.communicate(timeout=40)
    assert "saved: [2, 3]" in out, driver.stderr()
    assert driver.process.returncode == 0
    driver.wait_until_clean(2)


@pytest.mark.slow
def test_second_ctrl_c_aborts(driver: Driver) -> None:
    os.kill(driver.process.pid, signal.SIGTERM)
    time.sleep(0.1)
    os.kill(driver.process.pid, signal.SIGINT)
    out, _ = driver.process.communicate(timeout=40)
    if "saved" not in out:  # the loop may have been faster than the second signal
        assert driver.process.returncode != 0
        assert "KeyboardInterrupt" in driver.stderr()
    driver.wait_until_clean(2)


@pytest.mark.slow
def test_kill_9_of_the_raylet_is_told_as_such(driver: Driver) -> None:
    raylet = int(Path(f"/proc/{driver.pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(raylet, signal.SIGKILL)
    driver.process.communicate(timeout=60)
    assert driver.process.returncode != 0
    assert "its node was lost during sleep(): Ray's daemon on node" in driver.stderr()
    assert f"(raylet, process {raylet})" in driver.stderr()
    driver.wait_until_clean(20)


def test_kill_9_of_the_driver(driver: Driver, tmp_path: Path) -> None:
    """Nor a token of Ray's in the home folder, which later clusters would ask for."""
    driver.process.kill()
    driver.wait_until_clean(20)
    assert [path.name for path in tmp_path.iterdir() if path.suffix not in (".err", ".log")] == []


@pytest.mark.slow
def test_another_ray_takes_the_place_of_one_whose_daemon_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.cluster.lost_daemon_script", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=110)
    assert [line for line in done.stdout.splitlines() if line.startswith(("lost", "again"))] == [
        "lost: False",
        "lost: True",
        "again: [2]",
    ]
