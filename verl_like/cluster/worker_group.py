"""Interface of the trainer to its workers: a group of ranks, calls, results, errors.

A worker is any class constructed as `Worker(spec, rank_env)`. It may have a method `shutdown()`, called once when the
group stops in good order, and `run(role, method, *arguments)`, which gets the calls named "role.method". It is named by
an import path ("package.module:Class"), so nothing here imports workers.
"""

from __future__ import annotations

import importlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from verl_like.config.micro_batches import Lowered, PassTooLarge

RUN_ID_VARIABLE = "VERL_LIKE_RUN_ID"  # in the environment of every process of a run: lets clean-up find them


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """Position of one worker in its group.

    Example: RankEnv(rank=1, world_size=2, local_rank=1, local_world_size=2, node_rank=0, master_address="127.0.0.1",
    master_port=23456, run_id="vl3f9c02aa", device="cpu")
    """

    rank: int
    world_size: int
    local_rank: int  # position on its node, and index into the CUDA devices this process can see
    local_world_size: int
    node_rank: int
    master_address: str
    master_port: int
    run_id: str  # unique per run
    device: str  # "cpu" or "cuda"
    address: str = "127.0.0.1"  # of this machine, as the driver and other pools reach it
    group: str = "worker"  # name of the worker group
    asked_at: float = field(default_factory=time.time)  # when the driver asked for this worker

    @property
    def memory_id(self) -> str:
        """Part of the name of everything that this rank puts into /dev/shm."""
        return memory_id(self.run_id, self.group)


def memory_id(run_id: str, group: str) -> str:
    """Make the mark in the names of a group's entries in /dev/shm, and of no other group's.

    A group is cleaned up by it alone, while others of the run go on.
    """
    return f"{run_id}.{group}."


class WorkerError(RuntimeError):
    """A call to a worker group failed. The group is stopped: no later call can succeed.

    Attributes: `rank` of the first cause; `ranks`, all ranks concerned; `method`; `error_type`, the class name of the
    worker's own exception; `lowered`, what a `PassTooLarge` gives a new start; `remote_traceback`; `log_path` and
    `log_tail`, the worker's output file and its last lines.
    """

    def __init__(
        self,
        summary: str,
        *,
        rank: int,
        method: str,
        ranks: Sequence[int] = (),
        error_type: str = "",
        lowered: Lowered | None = None,
        remote_traceback: str = "",
        log_path: str = "",
        log_tail: str = "",
    ) -> None:
        parts = [summary]
        if remote_traceback:
            parts.append(f"--- traceback of rank {rank} ---\n{remote_traceback.rstrip()}")
        if log_tail:
            parts.append(f"--- last lines of {log_path} ---\n{log_tail.rstrip()}")
        elif log_path:
            parts.append(f"output of rank {rank}: {log_path}")
        super().__init__("\n".join(parts))
        self.rank = rank
        self.ranks = tuple(ranks) or (rank,)
        self.method = method
        self.error_type = error_type
        self.lowered = lowered
        self.remote_traceback = remote_traceback
        self.log_path = log_path
        self.log_tail = log_tail


class WorkerDied(WorkerError):
    """A worker's process is gone (killed, out of memory, crashed in native code, or its node was lost)."""


class WorkerTimeout(WorkerError):
    """Error of ranks that did not answer in time; `ranks` says which."""


class WorkerStalled(WorkerTimeout):
    """Ranks make no progress: `rank` is the one that the others wait for (cluster/watchdog.py)."""


class GroupStopped(WorkerError):
    """A call to a group that was shut down or has failed before."""


class PendingResult(Protocol):
    """The results of one call, perhaps still being computed."""

    def done(self) -> bool:
        """True where `wait` would return or raise at once."""
        ...

    def wait(self, timeout: float | None = None) -> list[Any]:
        """One result per rank, in rank order.

        Raises WorkerError at the first failure of any rank of the group, WorkerTimeout after `timeout` seconds. Both
        stop the whole group: ranks that wait in a collective for a failed one would never return.
        """
        ...


class WorkerGroup(Protocol):
    """Ranks that are called together (SPMD). Calls are executed by each rank in the order they were made."""

    @property
    def world_size(self) -> int: ...

    def call(
        self, method: str, per_rank: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any] | None = None
    ) -> PendingResult:
        """Call `method` on every rank, with one tuple of positional arguments per rank and the same `kwargs`."""
        ...

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> PendingResult:
        """Call `method` on every rank with the same arguments."""
        ...

    def shutdown(self) -> None:
        """Stop the workers. May be called twice."""
        ...


def lowered_by(error: BaseException) -> Lowered | None:
    """Return what a new start must do with smaller micro-batches to be spared this error; None for any other."""
    return error.lowered if isinstance(error, PassTooLarge) else None


def new_run_id() -> str:
    """A short unique name for one run, usable in file and shared-memory names."""
    return f"vl{uuid.uuid4().hex[:8]}"


def resolve_import_path(path: str) -> Any:
    """Return the object named by "package.module:Name".

    Raises ValueError for a malformed path or a missing name; errors of the module's own import pass through.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ValueError(f"worker import path {path!r} must look like 'package.module:Class'")
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        raise ValueError(f"worker import path {path!r}: module {module_name} has no {name!r}")
    return getattr(module, name)


def method_of(worker: Any, name: str) -> Callable[..., Any]:
    """Return the function that a call runs: the worker's method, or for "role.method" the `run` of a host of roles."""
    role, _, method = name.rpartition(".")
    return partial(worker.run, role, method) if role else getattr(worker, name)


def check_per_rank(per_rank: Sequence[tuple[Any, ...]], world_size: int, method: str) -> None:
    """Raise ValueError unless there is one tuple of arguments per rank."""
    if len(per_rank) != world_size:
        raise ValueError(f"{method}: got arguments for {len(per_rank)} ranks, but the group has {world_size}")
    for rank, args in enumerate(per_rank):
        if not isinstance(args, tuple):
            raise ValueError(f"{method}: arguments of rank {rank} must be a tuple, not {type(args).__name__}")
