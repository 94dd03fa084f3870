"""Order of requests: those of a model by their numbers, those of tenants in turns that follow what each has had."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to be computed. seq: of a model's requests, whose order it is; cost: tokens, about."""

    request: str
    tenant: str
    kind: str
    session: str
    model: str | None = None
    seq: int = 0
    cost: int = 1


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

    def jobs(self) -> Iterator[Job]:
        """All that wait."""
        for jobs in self._ready.values():
            yield from jobs
        for early in self._early.values():
            yield from early.values()

    def waiting(self, tenant: str) -> int:
        """Count a tenant's jobs."""
        return sum(1 for job in self.jobs() if job.tenant == tenant)

    def overdue(self) -> Iterator[tuple[str, Job]]:
        """Yield (model, the first job that came before its turn) of models whose due job is not there."""
        for model, early in self._early.items():
            if early:
                yield model, early[min(early)]

    def put(self, job: Job) -> None:
        """Add a job; a model's with a number that is not yet due waits for those before."""
        if job.model is None:
            self._make_ready(job)
            return
        early = self._early.setdefault(job.model, {})
        early[job.seq] = job
        while (due := early.pop(self.next_seq.setdefault(job.model, 1), None)) is not None:
            self.next_seq[job.model] += 1
            self._make_ready(due)

    def pop(self) -> Job | None:
        """Take the next job; None where none is ready."""
        able = [tenant for tenant, jobs in self._ready.items() if jobs]
        if not able:
            return None
        tenant = min(able, key=self._had.__getitem__)  # of equals the one that waits longest
        job, self._now = self._ready[tenant].popleft(), self._had[tenant]
        self._had[tenant] += job.cost
        if self._ready[tenant]:
            self._ready[tenant] = self._ready.pop(tenant)  # to the end of equals
        else:
            del self._ready[tenant]
        return job

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
