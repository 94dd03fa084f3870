"""Failures of ranks: the choice of the one that caused the others, and how it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from verl_like.cluster.rank_process import Outcome
from verl_like.cluster.worker_group import WorkerDied, WorkerError
from verl_like.config.micro_batches import Lowered

# What torch.distributed says on a rank whose partner went away: an echo of another rank's failure.
_ECHO_MARKS = (
    "closed by peer", "Connection reset", "Broken pipe", "DistBackendError", "ncclRemoteError", "Connection refused",
    "connectFullMesh", "Timed out waiting",
)  # fmt: skip

_LOST = ("died", "node")  # kinds of a failure after which there is no process

_VANISHED = (
    "it was killed (kill -9, or by the kernel for want of memory: see dmesg), crashed in native code, or called _exit"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One rank's failure in one call."""

    rank: int
    method: str
    kind: str  # the worker's exception class, or "died", "node" (the node's Ray is gone), "stopped", "transport"
    message: str
    lowered: Lowered | None = None
    traceback: str = ""
    log_tail: str = ""

    @classmethod
    def of_outcome(cls, rank: int, method: str, outcome: Outcome) -> Failure:
        own = {"traceback": outcome.traceback, "log_tail": outcome.log_tail, "lowered": outcome.lowered}
        return cls(rank=rank, method=method, kind=outcome.error_type, message=outcome.message, **own)

    @classmethod
    def of_dead_process(cls, rank: int, method: str, error: Exception) -> Failure:
        return cls(rank=rank, method=method, kind="died", message=_exit_detail(str(error)))

    @classmethod
    def of_transport(cls, rank: int, method: str, error: Exception) -> Failure:
        return cls(rank=rank, method=method, kind=type(error).__name__, message=str(error))

    @classmethod
    def of_stopped_process(cls, rank: int, method: str, pid: int) -> Failure:
        return cls(rank=rank, method=method, kind="stopped", message=stopped_text(pid))

    def on_lost_node(self, address: str, raylet_pid: int) -> Failure:
        """Retell the death as that of the node's Ray, which takes all its workers with it."""
        message = f"Ray's daemon on node {address} (raylet, process {raylet_pid}) is gone: {_VANISHED}"
        return replace(self, kind="node", message=message)

    @property
    def is_echo(self) -> bool:
        """True where this looks like the consequence of another rank's failure."""
        return any(mark in self.message or mark in self.kind for mark in _ECHO_MARKS)

    def line(self, world_size: int, name: str) -> str:
        where = f"{name} rank {self.rank} of {world_size}"
        if self.kind == "died":
            return f"{where}: its process died during {self.method}(): {self.message}"
        if self.kind == "node":
            return f"{where}: its node was lost during {self.method}(): {self.message}"
        if self.kind == "stopped":
            return f"{where} {self.message} during {self.method}()"
        return f"{where} failed in {self.method}(): {self.kind}: {self.message}"


def likely_cause(failures: Sequence[Failure]) -> Failure:
    """The first failure that is not an echo; a dead process counts before an exception, the lowest rank of equals."""
    first = min(failures, key=lambda failure: (failure.is_echo, failure.kind not in _LOST))
    equals = [failure for failure in failures if (failure.kind, failure.message) == (first.kind, first.message)]
    return min(equals, key=lambda failure: failure.rank)


def raise_for(
    failures: Sequence[Failure],
    *,
    world_size: int,
    logs: Mapping[int, str],
    tails: Mapping[int, str],
    name: str = "worker",
) -> NoReturn:
    """Raise WorkerError (WorkerDied for a lost process) for the likely cause, naming the other ranks' failures too.
    name: of the group."""
    cause = likely_cause(failures)
    others = [failure for failure in failures if failure is not cause]
    lines = [cause.line(world_size, name)]
    lines += [f"  also: {other.line(world_size, name).splitlines()[0]}" for other in others]
    kind = WorkerDied if cause.kind in _LOST else WorkerError
    raise kind(
        "\n".join(lines),
        rank=cause.rank,
        ranks=[cause.rank, *(other.rank for other in others)],
        method=cause.method,
        error_type="" if cause.kind in _LOST else cause.kind,
        lowered=cause.lowered,
        remote_traceback=cause.traceback,
        log_path=logs[cause.rank],
        log_tail=tails[cause.rank],
    )


def stopped_text(pid: int) -> str:
    """Describe a process that is stopped, and how to let it go on."""
    return f"was stopped (process {pid}: SIGSTOP or a debugger; kill -CONT {pid} lets it go on)"


def _exit_detail(text: str) -> str:
    """The telling part of Ray's long message about a dead actor."""
    if "unexpectedly exits with a connection error" in text:  # Ray only saw the process's socket close
        return _VANISHED
    if "temporarily unavailable" in text:  # of another machine, before Ray knows what became of it
        return f"the connection to it broke: its machine is gone or out of reach, or {_VANISHED}"
    for mark in ("Worker exit detail:", "The actor died because"):
        if mark in text:
            text = text[text.index(mark) :].removeprefix("Worker exit detail:").strip()
            break
    return " ".join(text.split())
