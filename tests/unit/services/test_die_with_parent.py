"""A program in a session of its own ends with whoever started it, however that ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.rewards.test_manager import gone
from verl_like.plugins.agents.tools import die_with_parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
PARENT = """
import os, subprocess, sys, time
program = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen([sys.executable, "-I", sys.argv[1], str(os.getpid()), *program], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT, die_with_parent.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        while "time.sleep" not in (text := Path(f"/proc/{child}/cmdline").read_text()) or "die_with_parent" in text:
            time.sleep(0.01)  # it has not become the program yet
        os.kill(parent.pid, signal.SIGKILL)
    assert gone(child)


def test_it_does_not_begin_when_its_parent_has_ended() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    command = [sys.executable, "-I", die_with_parent.__file__, str(ended.pid), "echo", "begun"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout == ""


def test_a_program_that_is_not_there_says_so() -> None:
    run = subprocess.run(
        [sys.executable, "-I", die_with_parent.__file__, str(os.getpid()), "/no/such"], capture_output=True, text=True
    )
    assert run.returncode == 1 and run.stderr == "/no/such: No such file or directory\n"
