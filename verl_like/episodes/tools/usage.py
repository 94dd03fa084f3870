"""How often each tool was called, what came of it, and how long it took."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent.futures import Future
from functools import partial

from verl_like.episodes.tools.tool_call import ToolOutcome


class ToolUsage:
    """Calls that have ended, by tool: also those of episodes that nobody waits for any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: defaultdict[str, list[tuple[str | None, float]]] = defaultdict(list)  # kind, seconds in the tool

    def watch(self, name: str, future: Future[ToolOutcome]) -> None:
        """Count this call when it ends."""
        future.add_done_callback(partial(self._add, name))

    def _add(self, name: str, future: Future[ToolOutcome]) -> None:
        if future.cancelled() or future.exception() is not None:  # the pool was closed: no outcome of the tool's
            return
        outcome = future.result()
        with self._lock:
            self._ended[name].append((outcome.kind, outcome.seconds))

    def take(self) -> dict[str, float]:
        """Metrics tool/<name>/*; what they are of is forgotten."""
        with self._lock:
            ended, self._ended = self._ended, defaultdict(list)
        metrics: dict[str, float] = {}
        for name, calls in sorted(ended.items()):
            kinds, seconds = zip(*calls, strict=True)
            metrics |= {
                f"tool/{name}/calls": float(len(calls)),
                f"tool/{name}/errors": float(sum(kind is not None for kind in kinds)),
                f"tool/{name}/timeouts": float(kinds.count("timeout")),
                f"tool/{name}/seconds/mean": sum(seconds) / len(calls),
                f"tool/{name}/seconds/max": max(seconds),
            }
        return metrics
