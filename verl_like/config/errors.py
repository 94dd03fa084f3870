"""One error for all problems found, so that a user fixes a command line once."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class ConfigError(ValueError):
    """The configuration cannot work. `problems` holds one line per fault: keys, values, fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
            return
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
        super().__init__(f"{len(self.problems)} problems in the configuration:\n{lines}")


@contextmanager
def input_errors() -> Iterator[None]:
    """Turn faults of files and settings into messages for the user; the traceback goes to the log file.

    Raises ConfigError in place of ValueError and OSError.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        logger.debug("the run's inputs are refused", exc_info=True)
        raise error if isinstance(error, ConfigError) else ConfigError([str(error)]) from error


class RunStopped(RuntimeError):
    """The run cannot go on for a reason that its user can act on: the message says all, a traceback adds nothing."""


def raise_if_any(problems: Sequence[str]) -> None:
    """Raise ConfigError unless the list is empty."""
    if problems:
        raise ConfigError(problems)
