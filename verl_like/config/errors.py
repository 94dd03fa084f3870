"""One error for all problems found, so that a user fixes a command line once."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def raise_if_any(problems: Iterable[str]) -> None:
    """Raise ConfigError with these problems, each once, unless there are none.

    What several checks find is told in the words of the first; a later one may have put a section before its key, and
    several models may take a folder, or a size, from one key.
    """
    found: dict[str, str] = {}
    for problem in problems:
        words = re.sub(r"^[\w.]+\.(?=(model\.path|ulysses_sequence_parallel_size)=)", "", problem)
        if not any(told and words.endswith(told) for told in found):
            found[words] = problem
    if found:
        raise ConfigError([*found.values()])


def problems_of(*checks: Callable[[], object], prefix: str = "") -> Iterator[str]:
    """Yield what each of these checks finds wrong: what it yields, and its ValueError or OSError, which ends it alone.

    prefix: of each problem. What a check returns, where that is no iterator of problems, is not looked at.
    """
    for check in checks:
        try:
            if isinstance(found := check(), Iterator):
                yield from (f"{prefix}{text}" for text in found)
        except (ValueError, OSError) as error:
            logger.debug("the run's inputs are refused", exc_info=True)
            yield from (f"{prefix}{text}" for text in getattr(error, "problems", [str(error)]))
