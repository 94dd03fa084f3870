"""Worker groups of a run: one for each pool of its placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from verl_like.cluster.worker_group import WorkerGroup
from verl_like.config.batch_plan import BatchPlan


class Pools:
    """Worker groups by pool, for calls to the processes as such, whatever roles they host."""

    def __init__(self, groups: Mapping[str, WorkerGroup], plan: BatchPlan, timeout_s: float) -> None:
        """Take the worker groups, by the pool's name as in the plan."""
        self.groups, self._plan, self._timeout_s = groups, plan, timeout_s
        self.reachable: Callable[[], AbstractContextManager[None]] = nullcontext  # inside, every process can be called

    def of(self, role: str) -> WorkerGroup:
        """Return the processes that host a role."""
        return self.groups[self._plan.pool_of(role).name]

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every process; return the answers of all pools."""
        with self.reachable():
            pending = [group.call_all(method, *arguments) for group in self.groups.values()]
            return [answer for each in pending for answer in each.wait(timeout=self._timeout_s)]

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Record everything that the workers do inside; each chosen rank writes its trace at the end."""
        self.ask("start_profile", step)
        yield
        self.ask("stop_profile")
