"""Order of requests: those of a model by their numbers, those of tenants in turns that follow what each has had.

Also whose models leave memory where they are many.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# Of one model these are not taken together: what follows one of them waits for its files.
ONE_OF_A_MODEL = frozenset({"optim_step", "save_weights", "save_weights_for_sampler"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to be computed. model: none for samples. seq: of a model's requests, whose order it is.

    cost: tokens, about. size: bytes of its body. alone: it may have ended a server, so it shares no pass. came: seconds
    of the monotonic clock.
    """

    request: str
    tenant: str
    kind: str
    session: str
    model: str = ""
    seq: int = 0
    cost: int = 1
    size: int = 0
    alone: bool = False
    came: float = field(default_factory=time.monotonic)


class FairQueue:
    """Jobs that wait. The tenant who has had least is served next; who was away has no claim from that time.

    A model's job is ready when all before it were. next_seq: number of a model's next job.
    """

    def __init__(self) -> None:
        self._ready: dict[str, deque[Job]] = {}
        self._early: dict[str, dict[int, Job]] = {}  # of each model, those that came before their turn
        self._had: dict[str, float] = {}  # tokens
        self._now = 0.0  # what the tenant had who was served last
        self.next_seq: dict[str, int] = {}
        self._moved: dict[str, float] = {}  # when a model's next job became another

    def jobs(self) -> Iterator[Job]:
        """All that wait."""
        for jobs in self._ready.values():
            yield from jobs
        for early in self._early.values():
            yield from early.values()

    def waiting(self, tenant: str) -> tuple[int, int]:
        """Count a tenant's jobs, and the bytes of their bodies."""
        sizes = [job.size for job in self.jobs() if job.tenant == tenant]
        return len(sizes), sum(sizes)

    def overdue(self, before: float) -> Iterator[tuple[Job, int]]:
        """Yield jobs that wait since then for one of their model that is not there, and its number."""
        for model, early in self._early.items():
            if early and max((job := early[min(early)]).came, self._moved.get(model, job.came)) < before:
                yield job, self.next_seq[model]

    def put(self, job: Job) -> None:
        """Add a job; a model's with a number that is not yet due waits for those before."""
        if not job.model:
            self._make_ready(job)
            return
        early = self._early.setdefault(job.model, {})
        early[job.seq] = job
        while (due := early.pop(self.next_seq.setdefault(job.model, 1), None)) is not None:
            self.next_seq[job.model] += 1
            self._moved[job.model] = time.monotonic()
            self._make_ready(due)

    def pop(self, room: Mapping[str, int] | None = None) -> list[Job]:
        """Take the next job, and those that share its pass; none where none is ready.

        room: tokens of a pass that jobs share, by kind; where it has none, jobs share nothing.
        """
        if (first := self._take(lambda _: True)) is None:
            return []
        taken, most = [first], 0 if first.alone else (room or {}).get(first.kind, 0)
        self._now = self._had[first.tenant] - first.cost

        def fits(job: Job) -> bool:
            if job.kind in ONE_OF_A_MODEL and any(job.model == each.model for each in taken):
                return False
            return job.kind == first.kind and not job.alone and job.cost + sum(each.cost for each in taken) <= most

        while (more := self._take(fits)) is not None:
            taken.append(more)
        return taken

    def _take(self, fits: Callable[[Job], bool]) -> Job | None:
        """Take a job that fits, of the tenant who has had least, and none of whose model is before it."""
        for tenant in sorted(self._ready, key=self._had.__getitem__):  # of equals the one that waits longest
            passed = set[str]()
            for job in self._ready[tenant]:
                if job.model not in passed and fits(job):
                    jobs = self._ready.pop(tenant)
                    jobs.remove(job)
                    self._had[tenant] += job.cost
                    if jobs:
                        self._ready[tenant] = jobs  # at the end of equals
                    return job
                passed.add(job.model)
        return None

    def remove(self, wanted: Any) -> list[Job]:
        """Take out the jobs of which `wanted(job)` is true."""
        gone = [job for job in self.jobs() if wanted(job)]
        self._ready = {
            tenant: kept for tenant, jobs in self._ready.items() if (kept := deque(j for j in jobs if not wanted(j)))
        }
        for early in self._early.values():
            for seq in [seq for seq, job in early.items() if wanted(job)]:
                del early[seq]
        return gone

    def _make_ready(self, job: Job) -> None:
        if job.tenant not in self._ready:
            self._had[job.tenant] = max(self._had.get(job.tenant, 0.0), self._now)
            self._ready[job.tenant] = deque()
        self._ready[job.tenant].append(job)


class Residents:
    """Models that may be in memory, `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tenants: dict[str, str] = {}  # by model, the one that was used last at the end

    def use(self, used: Mapping[str, str]) -> list[str]:
        """Note that models (with their tenants) are used; return those that leave.

        Of the tenant who has most of them, the one that was used longest ago; of those that are used now only where no
        other is left.
        """
        self._tenants = {name: tenant for name, tenant in self._tenants.items() if name not in used} | dict(used)
        gone = list[str]()
        while len(self._tenants) > self._most:
            counts = Counter(self._tenants.values())
            others = [name for name in self._tenants if name not in used] or list(self._tenants)
            gone.append(max(others, key=lambda name: counts[self._tenants[name]]))
            del self._tenants[gone[-1]]
        return gone

    def forget(self, model: str) -> None:
        """Note that a model has left by itself."""
        self._tenants.pop(model, None)
