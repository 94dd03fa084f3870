"""One live run per folder; a dead one's lock does not stand in the way."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_like.checkpoint import lock
from verl_like.checkpoint.lock import LOCK_FILE, RunLock, RunLocked, held


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / LOCK_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_live_run_keeps_others_out_and_is_named(tmp_path: Path) -> None:
    with held(tmp_path, "vl111111") as first:
        expected = rf"default_local_dir='{tmp_path}' belongs to a live run \(host .*process {os.getpid()}, run vl111111"
        with pytest.raises(RunLocked, match=expected):
            RunLock(tmp_path, "vl222222").acquire()
        first.confirm()
    assert not (tmp_path / LOCK_FILE).exists()
    with held(tmp_path, "vl222222"):
        pass


def test_of_runs_that_start_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    def attempt(number: int) -> bool:
        try:
            RunLock(tmp_path, f"vl{number}").acquire()
        except RunLocked:
            return False
        return True

    for number in range(10):
        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(attempt, range(8))) == 1, number
        (tmp_path / LOCK_FILE).unlink()


def test_a_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), held(tmp_path, "vl111111"):
        raise KeyboardInterrupt
    assert not (tmp_path / LOCK_FILE).exists()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also while the dead process still waits for its parent to look at it (a zombie)."""
    script = f"""
import os
from verl_like.checkpoint.lock import RunLock
RunLock({str(tmp_path)!r}, "vl9").acquire()
os.kill(os.getpid(), 9)
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, not reaped
    with caplog.at_level(logging.WARNING), held(tmp_path, "vl111111"):
        assert f"process {process.pid}, run vl9" in caplog.text and "taken over" in caplog.text
    process.wait()


def test_a_process_id_that_was_used_again_is_another_process(tmp_path: Path) -> None:
    with held(tmp_path, "vl111111"):
        rewrite(tmp_path, started="1")
        with held(tmp_path, "vl222222"):
            pass


def test_another_machine_is_watched_for_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock, "WATCH_S", 0.2)
    other = RunLock(tmp_path, "vl111111")
    other.own |= {"host": "far", "machine": "far"}
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    other.acquire()
    with pytest.raises(RunLocked, match="host far"):
        RunLock(tmp_path, "vl222222").acquire()
    other._ended.set()  # as a kill ends it: no release
    other._heart.join()
    with caplog.at_level(logging.WARNING), held(tmp_path, "vl222222") as mine:
        assert "waiting up to" in caplog.text and "taken over" in caplog.text
        with pytest.raises(RunLocked, match=r"another run took over .*run vl222222"):
            other.confirm()
        other.release()  # not its own any more
        mine.confirm()


def test_a_removed_lock_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    with held(folder, "vl111111") as mine:
        (folder / LOCK_FILE).unlink()
        mine.confirm()
        with pytest.raises(RunLocked):
            RunLock(folder, "vl222222").acquire()


@pytest.mark.parametrize("text", ["", "{}", "[1]", "null", '{"pid": 1}', "[" * 100_000])
def test_rubbish_in_the_file_says_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK_FILE).write_text(text)
    with pytest.raises(RunLocked, match=r"run.lock is damaged: .*; delete it if no run writes"):
        RunLock(tmp_path, "vl111111").acquire()
