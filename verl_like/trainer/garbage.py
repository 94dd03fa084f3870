"""Python's collector of garbage in a process with millions of objects that stay, and thousands that come at once."""

from __future__ import annotations

import gc
from collections.abc import Callable

# New objects until the next look at them. Python's own 700 makes the driver of 16,000 episodes spend half of its time
# on looks that find nothing: what episodes leave is freed without the collector.
_NEW = 20_000


def settle() -> Callable[[], None]:
    """What is there now stays as long as the run, and is not looked through any more (a million objects of torch and
    transformers). What undoes it."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW, *before[1:])

    def undo() -> None:
        gc.set_threshold(*before)
        gc.unfreeze()

    return undo
