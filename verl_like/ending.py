"""End of a program of this package, whatever interrupts it: a line and a status.

The standard library alone, since this is in force while all else is imported.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def orderly_end() -> Iterator[None]:
    """End the program with a line and 128 + the signal's number, as shells count, where a signal interrupts it: Ctrl-C,
    or what the arguments of the KeyboardInterrupt say, (text, number); without a line where nobody reads its output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by what started us
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.exit("error: the current folder is not there any more; change to one that is")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt as error:
        text, number = error.args if len(error.args) == 2 else ("interrupted", signal.SIGINT)
        print(f"error: {text}", file=sys.stderr)
        sys.exit(128 + number)
    except OSError as error:
        if not (isinstance(error, BrokenPipeError) and _unread()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python has yet to flush
        sys.exit(128 + signal.SIGPIPE)


def _unread() -> bool:
    """True where the reader of our output has closed it, as `head` does."""
    watched = select.poll()
    watched.register(sys.stdout, 0)  # of no event but errors
    return bool(watched.poll(0))
