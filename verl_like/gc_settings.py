"""Python's collector of garbage in a process with a million objects that stay, and thousands that come at once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PYTHONS = gc.get_threshold()
# New objects until the collector looks through them, and looks of one kind until one of the next. Python's own numbers
# (700, 10, 10) make the driver of 16,000 episodes spend half of its time on looks that find nothing (a third, with
# 50,000): what episodes leave is freed without them, at the end of a step. What a user's code leaves in circles waits.
_SELDOM = (500_000, 4, 20)
_FEW = 10_000  # exempt objects: Python 3.12 begins with some hundred of its own


@contextmanager
def starting() -> Iterator[None]:
    """Collect garbage less often while a process starts, when nearly all objects stay.

    A quarter of the CPU time of importing torch and transformers would go into collections that find nothing.
    """
    before = gc.get_threshold()
    gc.set_threshold(5_000_000)  # a start brings a million, none of them garbage
    try:
        yield
    finally:
        gc.set_threshold(*before)


def settle(*, seldom: bool) -> Callable[[], None]:
    """Exempt the present objects from garbage collection: most are torch's and transformers', and stay for the run.

    Where objects are exempt already, by whoever began this process, these are the many ones: nothing is looked for, and
    nothing undone.

    seldom: collect newer objects less often; not for a process with an engine, where garbage may hold a device's
        memory.

    Returns the function that undoes both.
    """
    before, exempts = gc.get_threshold(), gc.get_freeze_count() < _FEW
    if exempts:
        gc.collect()
        gc.freeze()
    gc.set_threshold(*(_SELDOM if seldom else _PYTHONS))

    def undo() -> None:
        gc.set_threshold(*before)
        if exempts:
            gc.unfreeze()

    return undo
