"""Removes what a run leaves behind when its driver can no longer do so (kill -9, out of memory).

Run as a file by a fresh interpreter, `python -I -S janitor.py PARENT_PID RUN_ID KILL [FOLDER ...]`: it waits until its
parent is gone, gives the run's other processes a moment to end by themselves, kills those that remain (KILL=1, for the
driver, whose end it tells), and removes the run's /dev/shm entries and temporary folders. It imports the standard
library only and costs about 10 MB.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_RUN_ID_VARIABLE = "VERL_LIKE_RUN_ID"  # as in worker_group.py, which a process without site-packages cannot import
_POLL_SECONDS = 0.25
_GRACE_SECONDS = 5.0
_TELL_SECONDS = 1.0
_GONE = (
    "error: the driver (process {}, run {}) is gone: it was killed (kill -9, or by the kernel for want of memory: see "
    "dmesg), crashed, or was ended by Ray because Ray's daemon on this machine died. Its processes are ended; the same "
    "command goes on from the newest checkpoint (trainer.resume_mode=auto)\n"
)


def processes_of_run(run_id: str) -> list[int]:
    """Ids of this machine's processes that were started with the run's id in their environment (Linux only)."""
    marker = f"{_RUN_ID_VARIABLE}={run_id}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            continue
        if marker in variables and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def cleanup_shm(run_id: str, folder: Path = Path("/dev/shm")) -> list[str]:
    """Remove the entries of /dev/shm whose names contain the run id; returns their names."""
    if len(run_id) < 6:
        raise ValueError(f"run id {run_id!r} is too short to tell this run's shared memory from that of others")
    removed = []
    for entry in folder.glob(f"*{run_id}*") if folder.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
        removed.append(entry.name)
    return removed


def kill_processes(pids: Sequence[int]) -> None:
    """Kill these processes (SIGKILL); those that ended meanwhile are passed over."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def start_janitor(run_id: str, *, kill: bool, folders: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a janitor for this process. End it with `kill()` and `wait()` when all is cleaned up."""
    environment = {name: value for name, value in os.environ.items() if name != _RUN_ID_VARIABLE}
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), run_id, str(int(kill)), *folders]
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None if kill else subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C of the terminal must not end it before the driver
    )


def _tell(text: str) -> None:
    """Write a line on stderr, for a moment at most: the reader of a full pipe may have gone."""

    def write() -> None:
        with contextlib.suppress(OSError):  # nobody has it any more
            os.write(2, text.encode())

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_TELL_SECONDS)


def _main(parent_pid: int, run_id: str, kill: bool, folders: Sequence[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a job, it asks the driver to stop
    while os.getppid() == parent_pid:
        time.sleep(_POLL_SECONDS)
    if kill:
        _tell(_GONE.format(parent_pid, run_id))
        os.dup2(1, 2)  # whoever reads to the end is not to wait for the cleaning
    deadline = time.monotonic() + _GRACE_SECONDS
    while processes_of_run(run_id) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if kill:
        kill_processes(processes_of_run(run_id))
        time.sleep(_POLL_SECONDS)
    cleanup_shm(run_id)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1", sys.argv[4:])
