"""One error for all problems found, so that a user fixes a command line once."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class ConfigError(ValueError):
    """The configuration cannot work. `problems` holds one line per fault: keys, values, fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
            return
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
        super().__init__(f"{len(self.problems)} problems in the configuration:\n{lines}")


class RunStopped(RuntimeError):
    """The run cannot go on for a reason that its user can act on: the message says all, a traceback adds nothing."""


class Aborted(KeyboardInterrupt):
    """A second signal: the program is to end at once, without saving."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.number = number


@contextmanager
def status_of_signal() -> Iterator[None]:
    """End the program with one line and 128 + the signal's number, as shells count, where a signal interrupts it."""
    try:
        yield
    except KeyboardInterrupt as error:
        print(f"error: interrupted{f': {error}' if str(error) else ''}", file=sys.stderr)
        sys.exit(128 + (error.number if isinstance(error, Aborted) else signal.SIGINT))


def raise_if_any(problems: Sequence[str]) -> None:
    """Raise ConfigError unless the list is empty."""
    if problems:
        raise ConfigError(problems)
