"""Seconds per phase of a step: `with clock("gen"): ...` becomes the metric `timing_s/gen`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

# Phases whose cost follows the sampled tokens; the cost of all others follows prompt + response tokens (as verl).
_RESPONSE_TOKEN_PHASES = frozenset({"gen"})
_ALL_TOKEN_PHASES = frozenset({"old_log_prob", "ref", "teacher", "values", "adv", "update_critic", "update_actor"})


class PhaseObserver(Protocol):
    """Observer that is told what the run is doing now (the live display is one)."""

    def phase_started(self, name: str) -> None: ...

    def phase_ended(self, name: str, seconds: float) -> None: ...


class StepClock:
    """Adds up wall-clock seconds per phase. Phases may be nested and repeated; make one clock per step.

    Example:
        clock = StepClock(progress)
        with clock("step"):
            with clock("gen"):
                ...
        clock.metrics()  # {"timing_s/step": 2.1, "timing_s/gen": 1.7}

    A nested phase counts in its own name and in that of the phase around it. A phase that raises is counted too.
    """

    def __init__(self, observer: PhaseObserver | None = None, now: Callable[[], float] = time.perf_counter) -> None:
        self._observer = observer
        self._now = now
        self._seconds: dict[str, float] = {}
        self._running: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body as phase `name`.

        Raises ValueError if that phase is already running (its time would count twice).
        """
        if name in self._running:
            raise ValueError(f"phase {name!r} is already running inside {' > '.join(self._running)}")
        self._running.append(name)
        if self._observer is not None:
            self._observer.phase_started(name)
        start = self._now()
        try:
            yield
        finally:
            seconds = self._now() - start
            self._running.remove(name)
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if self._observer is not None:
                self._observer.phase_ended(name, seconds)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each finished phase, in order of first end."""
        return dict(self._seconds)

    def metrics(self) -> dict[str, float]:
        """Report `timing_s/<phase>` of all finished phases."""
        return {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}


def timing_per_token_metrics(
    seconds: Mapping[str, float], *, response_tokens: int, total_tokens: int
) -> dict[str, float]:
    """Compute `timing_per_token_ms/<phase>`, milliseconds per token, of phases whose cost follows the number of tokens.

    `gen` is divided by the response tokens, model passes by prompt + response tokens, each summed over the batch.
    """
    metrics: dict[str, float] = {}
    for name, value in seconds.items():
        tokens = response_tokens if name in _RESPONSE_TOKEN_PHASES else total_tokens
        if name in _RESPONSE_TOKEN_PHASES | _ALL_TOKEN_PHASES and tokens:
            metrics[f"timing_per_token_ms/{name}"] = 1000.0 * value / tokens
    return metrics
