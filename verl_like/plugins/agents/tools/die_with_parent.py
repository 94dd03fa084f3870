"""Runs a command that ends when the process PID ends: python die_with_parent.py PID COMMAND ARGUMENT ...

For programs that a library starts in a session of their own, where no signal to the worker's group reaches them. A file
for itself: it runs with nothing of the package on its path. Linux only; elsewhere the command just runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that, maybe before this Python had started
            sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
