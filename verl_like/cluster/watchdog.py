"""The run's watchdog: while the driver waits for its workers, it looks whether they get on, and says who does not.

Each worker publishes what it is at and how long that may take (verl_like/heartbeat.py); the driver reads it from
outside, with the state of the process. A rank is late when its limit is over; the run is stuck when a late rank's pool
has none that still works. Those that wait in a collective are late as well: the cause is the rank that is stopped, or
that its partners are ahead of, or that others say they wait for.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from verl_like.cluster.failures import stopped_text
from verl_like.cluster.nodes import on_node, process_state_here
from verl_like.cluster.rank_process import STACK_SIGNAL, read_tail
from verl_like.cluster.worker_group import WorkerStalled, memory_id
from verl_like.heartbeat import DRIVER, beacon_file, read_beacon, stacks_below

_STACK_LINES = 60
_AGAIN_S = 5.0  # a second look before the end


@dataclass(slots=True, kw_only=True)
class Watched:
    """State of one rank at the watchdog's last look.

    called: methods that it was asked for and has not answered.
    asked: monotonic time of the first of these calls.
    """

    pool: str
    rank: int
    size: int
    node_id: str
    pid: int
    log_path: str
    called: Sequence[str] = ()
    asked: float = 0.0
    state: str = "?"
    spans: list[dict[str, Any]] = field(default_factory=list)
    collective: dict[str, Any] = field(default_factory=dict)
    silent: bool = False  # its machine did not answer, though it did not long ago
    late: bool = False
    busy: bool = False  # works, within its limit

    @property
    def name(self) -> str:
        return f"{self.pool} rank {self.rank}"

    @property
    def span(self) -> dict[str, Any]:
        """Span that took longest in proportion to its limit."""
        return max(self.spans, key=lambda each: each["age_s"] / (each["allowed_s"] or 1e9), default={})

    def line(self) -> str:
        """Describe the rank's current work, for people."""
        span = self.span
        at = " > ".join(span["in"]) if span else f"it has not begun {', '.join(self.called) or 'anything'}"
        text = f"{self.name} (process {self.pid}, state {self.state}): {at}"
        if span:
            limit = f" of {span['allowed_s']:.0f} s" if span["allowed_s"] else ""
            text += f" for {span['age_s']:.0f} s{limit}" + (f", waits for {span['whom']}" if span["whom"] else "")
        last = [f"{each['name']} number {each['number']} of {name}" for name, each in self.collective.items()]
        return text + (f"; last collective: {', '.join(last)}" if last else "")


class WatchedGroup(Protocol):
    """Group of the ranks of a pool.

    spare: the run goes on without them.
    """

    name: str
    spare: bool

    def watched(self) -> list[Watched]:
        """List the group's ranks, with the calls that they have not answered."""
        ...

    def end(self, error: WorkerStalled) -> NoReturn:
        """Stop all ranks of the group and raise `error`."""
        ...


class Watchdog:
    """Watchdog of `groups`.

    stall_timeout: [s] trainer.stall_timeout; None: never.
    """

    def __init__(self, stall_timeout: float | None, run_id: str) -> None:
        self.stall_timeout, self._run_id = stall_timeout, run_id
        self.groups: list[WatchedGroup] = []
        self._silent: dict[str, float] = {}  # since when machines do not answer
        self._looked = self._since = -1e9  # the last look; the first of those that followed each other without a gap

    @property
    def interval_s(self) -> float:
        """Seconds between two looks."""
        return 30.0 if self.stall_timeout is None else min(30.0, self.stall_timeout / 6)

    def look_when_due(self) -> None:
        """Take a look if `interval_s` has passed since the last one; for a thread that waits for no call."""
        if time.monotonic() - self._looked >= self.interval_s:
            self.look()

    def look(self) -> None:
        """Return where all is well. Else write down all that is known, end the group of the rank that the others wait
        for, and raise WorkerStalled: the other groups are left alone, and what they hold may be saved. A spare group is
        ended alone: its own next call says so."""
        if self.stall_timeout is None:
            return
        now = time.monotonic()
        if now - self._looked > 2 * self.interval_s + 5:
            self._since = now  # this process did other things, or was stopped itself: perhaps with all the others
        self._looked = now
        stopped, late, _ = self._verdict()
        if stopped or late:
            time.sleep(_AGAIN_S)  # until then all have said what they are at
            stopped, late, ranks = self._verdict()
            if stopped or late:
                self._end(*_cause(stopped, late, ranks), ranks)
            self._looked = time.monotonic()

    def _verdict(self) -> tuple[list[Watched], list[Watched], list[Watched]]:
        """Return the ranks stopped for too long, the late ones of pools in which no rank works, and all ranks."""
        ranks, now = [rank for group in self.groups for rank in group.watched()], time.monotonic()
        self._see(ranks)
        for rank in ranks:
            self._judge(rank, now, now - self._since)
        busy = {rank.name for rank in ranks if rank.busy}
        for rank in ranks:
            rank.late = rank.late and rank.span.get("whom") not in busy  # they have their own limit
        stopped = [rank for rank in ranks if rank.state == "T" and rank.late]
        working = {rank.pool for rank in ranks if rank.busy}
        return stopped, [rank for rank in ranks if rank.late and rank.pool not in working], ranks

    def _end(self, cause: Watched, why: str, ranks: Sequence[Watched]) -> None:
        path = Path(cause.log_path).parent / "stall.txt"
        waited = ", ".join(dict.fromkeys(f"{rank.pool} in {rank.called[0]}()" for rank in ranks if rank.called))
        told = sorted((rank for rank in ranks if rank.called), key=lambda rank: rank is not cause)
        message = "\n".join(
            [
                f"{cause.name} of {cause.size} {why}: nothing moves any more in {', '.join(cause.called)}() "
                f"(trainer.stall_timeout={self.stall_timeout:g}; stacks of all processes: {path})",
                f"  {DRIVER} waits for {waited}",
                *(f"  {rank.line()}" for rank in told),
            ]
        )
        stacks = _stacks_of(ranks)
        services = {f"service, process {pid}": text for pid, text in stacks_below(os.getpid()).items()}
        _write_report(path, message, stacks | services)
        error = WorkerStalled(
            message,
            rank=cause.rank,
            ranks=[rank.rank for rank in told if rank.pool == cause.pool],
            method=(*cause.called, "")[0],
            log_path=cause.log_path,
            log_tail=stacks[cause.name],
        )
        group = next(group for group in self.groups if group.name == cause.pool)
        try:
            group.end(error)
        except WorkerStalled:
            if not group.spare:
                raise

    def _see(self, ranks: Sequence[Watched]) -> None:
        for node in dict.fromkeys(rank.node_id for rank in ranks):
            here = [rank for rank in ranks if rank.node_id == node]
            jobs = [(rank.pid, str(beacon_file(memory_id(self._run_id, rank.pool), rank.log_path))) for rank in here]
            found = on_node(node, _look_here, jobs)
            since = self._silent.setdefault(node, time.monotonic()) if isinstance(found, str) else None
            if since is None:
                self._silent.pop(node, None)
            for rank in here:
                rank.silent = since is not None and time.monotonic() - since <= (self.stall_timeout or 0.0)
            for rank, each in zip(here, [{}] * len(here) if isinstance(found, str) else found, strict=True):
                rank.state, rank.spans = each.get("state", "?"), each.get("spans", [])
                rank.collective = each.get("collective", {})

    def _judge(self, rank: Watched, now: float, seen_s: float) -> None:
        """Set the rank's `late` and `busy`."""
        assert self.stall_timeout is not None
        limits = [(min(each["age_s"], seen_s), each["allowed_s"]) for each in rank.spans if each["whom"] != DRIVER]
        if rank.called and not rank.spans:
            limits.append((now - max(rank.asked, self._since), self.stall_timeout))
        if not rank.called or rank.silent:
            rank.busy = rank.silent
            return
        if rank.state == "T":
            ages = [min(each["age_s"], seen_s) for each in rank.spans] or [limits[0][0]]
            rank.late = min(ages) > self.stall_timeout
            return
        over = [limit is not None and age > limit for age, limit in limits]
        rank.late = bool(over) and all(over)  # while a thread writes a checkpoint, another may wait for it
        rank.busy = not rank.late and any(not each["whom"] for each in rank.spans)


def _cause(stopped: Sequence[Watched], late: Sequence[Watched], ranks: Sequence[Watched]) -> tuple[Watched, str]:
    """Find the rank that the others wait for, and the reason."""
    for rank in (*stopped, *(each for each in ranks if each.called and each.state == "T")):
        return rank, stopped_text(rank.pid)
    for rank in ranks:
        if rank.called and rank.state in ("", "?"):
            return rank, "is on a machine that does not answer" if rank.state else "has ended"
    if (found := _behind(ranks)) is not None:
        return found
    names = {rank.name: rank for rank in ranks}
    for rank in late:
        if (other := names.get(rank.span.get("whom", ""))) is not None and not other.span.get("whom"):
            return other, f"makes no progress, and {rank.name} waits for it"
    own = [rank for rank in late if not rank.span.get("whom")] or late
    return max(own, key=lambda rank: rank.span.get("age_s", 0.0)), "makes no progress"


def _behind(ranks: Sequence[Watched]) -> tuple[Watched, str] | None:
    """Find the rank that has begun fewer collectives of a process group than its partners, who wait there."""
    pools = dict.fromkeys(rank.pool for rank in ranks if rank.called)
    for mine in ([rank for rank in ranks if rank.pool == pool] for pool in pools):
        for group in dict.fromkeys(name for rank in mine for name in rank.collective):
            there = [rank for rank in mine if group in rank.collective]
            first, last = (end(there, key=lambda rank: rank.collective[group]["number"]) for end in (min, max))
            begun, ahead = first.collective[group]["number"], last.collective[group]
            if begun < ahead["number"]:
                name = f"{ahead['name']} number {begun + 1} of {group}"
                return first, f"has not come to {name}, in which others wait"
    return None


def _look_here(jobs: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    return [{**(read_beacon(Path(path)) or {}), "state": process_state_here(pid)} for pid, path in jobs]


def _stacks_of(ranks: Sequence[Watched]) -> dict[str, str]:
    """Collect the stacks of these ranks' threads, by rank. A stopped rank is continued for it: its end follows."""
    found: dict[str, str] = {}
    for node in dict.fromkeys(rank.node_id for rank in ranks):
        here = [rank for rank in ranks if rank.node_id == node]
        texts = on_node(node, _stacks_here, [(rank.pid, rank.log_path) for rank in here])
        found |= {r.name: texts if isinstance(texts, str) else text for r, text in zip(here, texts, strict=False)}
    return found


def _stacks_here(jobs: Sequence[tuple[int, str]]) -> list[str]:
    for number in (STACK_SIGNAL, signal.SIGCONT):
        for pid, _ in jobs:
            try:
                os.kill(pid, number)
            except OSError:
                continue
    time.sleep(1.0)
    return [read_tail(path, _STACK_LINES) for _, path in jobs]


def _write_report(path: Path, message: str, stacks: Mapping[str, str]) -> None:
    """Append all that is known to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} ===\n{message}\n\n")
        for name, text in stacks.items():
            file.write(f"--- {name} ---\n{text}\n\n")
        file.write("--- the driver ---\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
