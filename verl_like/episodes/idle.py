"""Why replicas have nothing to sample, in the asynchronous modes."""

from __future__ import annotations

import time
from collections.abc import Callable

from verl_like.rollout.client import Occupancy

CAUSES: tuple[str, ...] = ("tail", "tool", "grader", "trainer", "weights")


class IdleClock:
    """Shares of the replicas' time by cause, added up at each look.

    paused_too: replicas that serve nothing now wait for weights (where a pool does nothing but sample); otherwise they
    train, and that time does not count.
    """

    def __init__(self, *, paused_too: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._paused_too, self._clock = paused_too, clock
        self._last, self._total_s = clock(), 0.0
        self._idle_s = dict.fromkeys(CAUSES, 0.0)

    def look(self, seen: Occupancy, cause: str) -> None:
        """As it was since the last look: `cause` is why those that serve have nothing to do."""
        now = self._clock()
        passed, self._last = now - self._last, now
        counted = seen.replicas if self._paused_too else seen.replicas - seen.held
        self._total_s += passed * counted
        self._idle_s[cause] += passed * seen.idle
        if self._paused_too:
            self._idle_s["weights"] += passed * seen.held

    def shares(self) -> dict[str, float]:
        """Tell async/idle_<cause> since the clock was made, or `restart`."""
        return {f"async/idle_{cause}": idle_s / (self._total_s or 1.0) for cause, idle_s in self._idle_s.items()}

    def restart(self) -> None:
        """Count anew."""
        self._total_s, self._idle_s = 0.0, dict.fromkeys(CAUSES, 0.0)
