"""Where the time of nested calls goes: each stage's own seconds, without those of stages inside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class StageClock:
    """`seconds[stage]`: what passed while that stage was the innermost. `wait`: called at each change of stage, for
    devices whose work goes on behind the call."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._wait = wait
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside, time belongs to `name`, unless another stage is opened within."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        self._wait()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


class Staged:
    """Stands in for `target`; the time in its methods goes to the stages that `stages` names, method -> stage.

    A method that yields is charged while it runs, not while its items are used.
    """

    def __init__(self, target: Any, clock: StageClock, stages: dict[str, str]) -> None:
        self._target, self._clock, self._stages = target, clock, stages

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name not in self._stages:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._clock.stage(self._stages[name]):
                result = value(*args, **kwargs)
            return self._charged(result, self._stages[name]) if isinstance(result, Iterator) else result

        return call

    def _charged(self, items: Iterator[Any], stage: str) -> Iterator[Any]:
        while True:
            with self._clock.stage(stage):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
