"""Signals, janitor and shared memory, without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from verl_like.cluster.janitor import cleanup_shm, processes_of_run, start_janitor
from verl_like.cluster.lifecycle import graceful_interrupt, kill_orphans, sigterm_blocked
from verl_like.cluster.worker_group import RUN_ID_VARIABLE, new_run_id

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_sets_the_flag_second_aborts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with graceful_interrupt() as flag:
        assert not flag.requested
        os.kill(os.getpid(), number)
        assert flag.requested and flag.signal_name == number.name
        with pytest.raises(KeyboardInterrupt, match="without saving"):
            os.kill(os.getpid(), number)
            time.sleep(1)
    assert signal.getsignal(number) is before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signal masks are inherited as on Linux")
def test_sigterm_spares_a_worker_and_not_its_children() -> None:
    script = """
        import os, signal, subprocess
        from verl_like.cluster.lifecycle import leave_signals_to_driver
        print("up", flush=True)
        input()  # SIGTERM comes here, while it is blocked
        leave_signals_to_driver()
        os.kill(os.getpid(), signal.SIGTERM)
        child = subprocess.Popen(["sleep", "60"])
        child.terminate()
        reader, writer = os.pipe()
        forked = os.fork()
        if forked == 0:
            os.write(writer, b"x")
            signal.pause()
        os.read(reader, 1)
        os.kill(forked, signal.SIGTERM)
        print(child.wait(), os.waitpid(forked, 0)[1], flush=True)
    """
    with sigterm_blocked():
        worker = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    with worker:
        assert worker.stdout is not None and worker.stdout.readline() == "up\n"
        worker.terminate()
        out, _ = worker.communicate("\n", timeout=30)
    assert (out, worker.returncode) == (f"{-signal.SIGTERM} {int(signal.SIGTERM)}\n", 0)


def test_sigterm_spares_the_janitor() -> None:
    janitor = start_janitor(new_run_id(), kill=False)
    time.sleep(0.5)
    janitor.terminate()
    time.sleep(0.2)
    assert janitor.poll() is None
    janitor.kill()
    janitor.wait()


def test_run_ids_differ() -> None:
    assert len({new_run_id() for _ in range(100)}) == 100


def test_only_entries_of_the_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / "psm_vl00000001_0").write_text("x")
    (tmp_path / "vl00000001").mkdir()
    (tmp_path / "psm_vl00000002_0").write_text("x")
    assert sorted(cleanup_shm("vl00000001", tmp_path)) == ["psm_vl00000001_0", "vl00000001"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["psm_vl00000002_0"]


def test_short_run_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too short"):
        cleanup_shm("", tmp_path)


def test_own_children_are_not_orphans() -> None:
    run_id = new_run_id()
    with subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_ID_VARIABLE: run_id}) as child:
        _wait_for(lambda: processes_of_run(run_id) == [child.pid])
        assert kill_orphans(run_id) == []
        child.kill()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_janitor_cleans_up_after_a_killed_driver(tmp_path: Path) -> None:
    run_id = new_run_id()
    script = f"""
        import os, subprocess, sys, time
        from verl_like.cluster.janitor import start_janitor
        start_janitor({run_id!r}, kill=True, folders=[{str(tmp_path / "session")!r}])
        variables = {{**os.environ, {RUN_ID_VARIABLE!r}: {run_id!r}}}
        quiet = {{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}}
        subprocess.Popen(["sleep", "600"], start_new_session=True, env=variables, **quiet)
        print("ready", flush=True)
        time.sleep(600)
    """
    (tmp_path / "session").mkdir()
    entry = Path("/dev/shm") / f"test_{run_id}"
    entry.write_text("x")
    command, pipe = [sys.executable, "-c", textwrap.dedent(script)], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as driver:
        try:
            assert driver.stdout is not None and driver.stdout.readline() == b"ready\n"
            _wait_for(lambda: len(processes_of_run(run_id)) == 1)  # the kernel shows its environment a little later
        finally:
            driver.kill()
        told = driver.communicate()[1].decode()
        assert f"the driver (process {driver.pid}, run {run_id}) is gone" in told
        assert processes_of_run(run_id)  # who reads what it says need not wait for the cleaning
    _wait_for(lambda: not processes_of_run(run_id) and not entry.exists() and not (tmp_path / "session").exists())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_janitor_cleans_up_where_nobody_reads_the_drivers_words(tmp_path: Path) -> None:
    script = f"""
        import os, time
        from verl_like.cluster.janitor import start_janitor
        start_janitor({new_run_id()!r}, kill=True, folders=[{str(tmp_path / "session")!r}])
        os.set_blocking(2, False)
        try:
            while True:
                os.write(2, b"x" * 4096)  # until the pipe is full
        except BlockingIOError:
            os.set_blocking(2, True)
        print("ready", flush=True)
        time.sleep(600)
    """
    (tmp_path / "session").mkdir()
    command, pipe = [sys.executable, "-c", textwrap.dedent(script)], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == b"ready\n"
        driver.kill()
        _wait_for(lambda: not (tmp_path / "session").exists(), 30)


def _wait_for(condition: object, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "condition did not become true"
        time.sleep(0.1)
