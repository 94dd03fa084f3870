"""Runs a command that ends when the process ends which started it: python leashed.py COMMAND ARGUMENT ...

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
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that
            sys.exit(1)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")


if __name__ == "__main__":
    main()
