"""Logging of the driver: one format, one file, no line twice. Workers log to their own files (cluster/)."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

_PACKAGE = "verl_like"
_FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PLAIN_FORMAT = "%(asctime)s %(levelname)s %(message)s"


@functools.cache
def driver_console() -> Console:
    """The console (stderr) that log lines and the live display share: two consoles would write into each other."""
    return Console(stderr=True)


def setup_driver_logging(
    log_dir: str | os.PathLike[str] | None, level: int | str = logging.INFO, console: Console | None = None
) -> None:
    """Send the package's log to the terminal (stderr, or `console`) and to `<log_dir>/verl_like.log`.

    With a terminal, lines go through rich, so that they appear above the live display and never through it. The file
    takes every level down to DEBUG; it is appended to when a run resumes. Calling again replaces the handlers.
    Loggers of other packages are left alone.
    """
    handlers: list[logging.Handler] = [_terminal_handler(console or driver_console())]
    handlers[0].setLevel(level)
    if log_dir is not None:
        path = Path(log_dir).expanduser() / f"{_PACKAGE}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        file_handler = logging.FileHandler(path, encoding="utf-8")
        file_handler.setFormatter(logging.Formatter(_FILE_FORMAT))
        file_handler.setLevel(logging.DEBUG)
        handlers.append(file_handler)
    _install(handlers, min(handler.level for handler in handlers))


def _terminal_handler(console: Console) -> logging.Handler:
    if console.is_terminal:
        return RichHandler(console=console, show_path=False, markup=False, log_time_format="%H:%M:%S")
    handler = logging.StreamHandler(console.file)
    handler.setFormatter(logging.Formatter(_PLAIN_FORMAT))
    return handler


def _install(handlers: list[logging.Handler], level: int) -> None:
    logger = logging.getLogger(_PACKAGE)
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(level)
    # hydra puts handlers on the root logger: without this every line would appear twice.
    logger.propagate = False
