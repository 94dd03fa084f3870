"""Logging of the driver: one format, one file, no line twice. Workers log to their own files (cluster/)."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from verl_like.config.errors import ConfigError, RunStopped
from verl_like.heartbeat import EPISODE
from verl_like.observe.redaction import hidden

_PACKAGE = "verl_like"
_FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PLAIN_FORMAT = "%(asctime)s %(levelname)s %(message)s"


@functools.cache
def driver_console() -> Console:
    """The console (stderr) that log lines and the live display share: two consoles would write into each other."""
    return Console(stderr=True)


class DiscreetFormatter(logging.Formatter):
    """Formatter that hides secrets (redaction.hidden), whatever an error says.

    as_json: one object a line.
    """

    def __init__(self, form: str, *, as_json: bool = False, run_id: str = "") -> None:
        super().__init__(form)
        self._as_json, self._run_id = as_json, run_id

    def format(self, record: logging.LogRecord) -> str:
        text = hidden(super().format(record))
        if not self._as_json:
            return text
        message, _, rest = text.partition("\nTraceback (most recent call last):\n")
        facts = {"time": record.created, "level": record.levelname, "logger": record.name, "run_id": self._run_id}
        if episode := EPISODE.get():
            facts["episode"] = episode
        return json.dumps({**facts, "message": message, **({"traceback": rest} if rest else {})}, ensure_ascii=False)


def setup_driver_logging(
    log_dir: str | os.PathLike[str] | None,
    level: int | str = logging.INFO,
    console: Console | None = None,
    *,
    as_json: bool = False,
    run_id: str = "",
) -> None:
    """Send the package's log to the terminal (stderr, or `console`) and to `<log_dir>/verl_like.log`.

    With a terminal, lines go through rich, so that they appear above the live display and never through it. The file
    takes every level down to DEBUG; it is appended to when a run resumes. Calling again replaces the handlers.
    Loggers of other packages are left alone.

    as_json: the file holds an object a line, with run_id and, where it is about one, the episode.
    """
    handlers: list[logging.Handler] = [_terminal_handler(console or driver_console())]
    handlers[0].setLevel(level)
    if log_dir is not None:
        path = Path(log_dir).expanduser() / f"{_PACKAGE}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        # half a surrogate pair, as in a file's name that is no UTF-8, is written as \udc80: the line is not lost
        file_handler = _RunLog(path, encoding="utf-8", errors="backslashreplace")
        form = "%(message)s" if as_json else _FILE_FORMAT
        file_handler.setFormatter(DiscreetFormatter(form, as_json=as_json, run_id=run_id))
        file_handler.setLevel(logging.DEBUG)
        handlers.append(file_handler)
    _install(handlers, min(handler.level for handler in handlers))


@contextmanager
def told_in_a_line(what: str, over: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """End the program with a line on an error that nobody foresaw.

    The whole text goes to the log file, or to one of its own where there is none yet.

    over: no line is written: what is said of an error then is left to others.
    """
    try:
        yield
    except (ConfigError, RunStopped):
        raise
    except Exception as error:
        if over():
            raise
        handlers = logging.getLogger(_PACKAGE).handlers
        path = next((each.baseFilename for each in handlers if isinstance(each, logging.FileHandler)), "")
        if path:
            logging.getLogger(__name__).debug("%s failed", what, exc_info=True)
        else:
            descriptor, path = tempfile.mkstemp(prefix=f"{_PACKAGE}_", suffix=".log")
            with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(hidden("".join(traceback.format_exception(error))))
        first = next(iter(str(error).splitlines()), "no message")
        sys.exit(hidden(f"error: {what} failed: {type(error).__name__}: {first}; the whole text is in {path}"))


class _RunLog(logging.FileHandler):
    """Log file of a run, which may be gone when the process goes on: a line after that fails nobody.

    Libraries that set logging up (vLLM, when it is imported) close the handlers of all; such a one opens its file again
    at the next line, and the standard library's raises where it cannot.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is not None or os.path.isdir(os.path.dirname(self.baseFilename)):
            super().emit(record)


def _terminal_handler(console: Console) -> logging.Handler:
    handler: logging.Handler = logging.StreamHandler(console.file)
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, markup=False, log_time_format="%H:%M:%S")
    handler.setFormatter(DiscreetFormatter("%(message)s" if console.is_terminal else _PLAIN_FORMAT))
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
