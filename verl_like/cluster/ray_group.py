"""A worker group with one Ray actor, that is one process, per rank.

Ranks run collectives with each other, so the failure of one leaves the others waiting for ever. Every wait therefore
watches all outstanding calls of all ranks; at the first failure it gives the others a moment to report theirs, kills
the whole group and raises the most telling error. Use a group from one thread.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_like.cluster import worker_group
from verl_like.cluster.environment import LOOPBACK
from verl_like.cluster.failures import Failure, raise_for, stopped_text
from verl_like.cluster.janitor import cleanup_shm, kill_processes
from verl_like.cluster.lifecycle import pass_on_sigterm
from verl_like.cluster.nodes import log_tail, process_state, stack_tail
from verl_like.cluster.rank_process import Outcome, RankProcess, StartRequest
from verl_like.cluster.resources import Allocation
from verl_like.cluster.watchdog import Watchdog, Watched

logger = logging.getLogger(__name__)

_ECHO_SECONDS = 2.0  # how long other ranks may report after the first failure
_STOP_SECONDS = 30.0  # for an orderly shutdown of idle workers
_BUSY_STOP_SECONDS = 3.0  # the same when calls are still running
_GONE_SECONDS = 5.0
_LOOK_SECONDS = 30.0  # between two looks at ranks that do not answer
# The driver's settings that remote nodes do not inherit from its environment.
_FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "VLLM_", "TORCH_", "PYTORCH_", "TRANSFORMERS_", "HF_HOME", "HF_HUB_")
_FORWARDED_NAMES = ("OMP_NUM_THREADS",)
_NOT_FORWARDED = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_HOST_IP", "VLLM_PORT")


class _RayRank(RankProcess):
    """The actor class: adds to a rank process what only Ray knows."""

    def start(self, request: StartRequest, spec: bytes) -> Outcome:
        outcome = super().start(request, spec)
        if "torch" in sys.modules:
            _register_transport()
        return outcome

    def describe(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", []))
        return {**super().describe(), "node_id": context.get_node_id(), "gpus": gpus}


@dataclass(slots=True, kw_only=True)
class _Rank:
    """The driver's side of one worker."""

    actor: Any
    node_rank: int
    node_id: str
    address: str
    pid: int = 0
    raylet_pid: int = 0
    gpus: tuple[str, ...] = ()
    log_path: str = ""


class RayPendingResult:
    """Results of one call on all ranks of a Ray group."""

    def __init__(self, group: RayWorkerGroup, method: str, refs: Sequence[Any]) -> None:
        self.method, self.began = method, time.monotonic()
        self.waiting: dict[Any, int] = {ref: rank for rank, ref in enumerate(refs)}  # what has not been read yet
        self.values: list[Any] = [None] * len(refs)
        self._good: set[Any] = set()  # finished without an error, and not read yet
        self._group = group

    def done(self) -> bool:
        if self._group.stopped_by is not None or not self.waiting:
            return True
        refs = list(self.waiting)
        ready = ray.wait(refs, num_returns=len(refs), timeout=0)[0]
        return len(ready) == len(refs) or any(map(self._failed, ready))

    def _failed(self, ref: Any) -> bool:
        """True where this finished call failed: its rank's partners may never end theirs."""
        if ref in self._good:
            return False
        try:
            failed = bool(ray.get(ref).error_type)
        except Exception:  # `take` says what it is
            return True
        if not failed:
            self._good.add(ref)
        return failed

    def wait(self, timeout: float | None = None) -> list[Any]:
        self._group.watch(self, timeout)
        return self.values

    def take(self, ref: Any) -> Failure | None:
        """Read one finished call; a failure is returned, not raised."""
        rank = self.waiting.pop(ref)
        try:
            outcome: Outcome = ray.get(ref)
        except RayActorError as error:
            return Failure.of_dead_process(rank, self.method, error)
        except Exception as error:  # Ray's own trouble with arguments or results, such as a value that cannot travel
            return Failure.of_transport(rank, self.method, error)
        if outcome.error_type:
            return Failure.of_outcome(rank, self.method, outcome)
        if outcome.asked_to_stop:
            self._group.asked_to_stop(rank)
        self.values[rank] = outcome.value
        return None


class RayWorkerGroup:
    """Group of workers, one per slot of the allocation, started and called together.

    Raises WorkerError with the worker's own traceback when a constructor fails, WorkerTimeout after `start_timeout` s.

    worker: import path "package.module:Class".
    spec: first argument of the class; anything that pickles.
    log_dir: folder in which each rank writes `<name>_rank<r>.log`, on its own node.
    environment: further variables for the workers.
    runtime_env: Ray's, for the workers alone.
    wait: wait until all workers are built; otherwise `wait_started` does.
    watchdog: the run's.
    spare: the run goes on without this group.
    """

    def __init__(
        self,
        worker: str,
        spec: Any,
        *,
        allocation: Allocation,
        run_id: str,
        log_dir: str | Path,
        start_timeout: float = 600,
        environment: Mapping[str, str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        name: str = "worker",
        wait: bool = True,
        watchdog: Watchdog | None = None,
        spare: bool = False,
    ) -> None:
        self.run_id, self.name, self.spare = run_id, name, spare
        self._watchdog, self._passed_on = watchdog or Watchdog(None, run_id), False
        self._watchdog.groups.append(self)
        self.stopped_by: worker_group.WorkerError | None = None
        self._outstanding: list[RayPendingResult] = []
        self._mentioned: set[int] = set()  # ranks that the user was told are stopped
        self._ranks = _create_actors(allocation, runtime_env)
        try:
            self._place(allocation, Path(log_dir).resolve(), name, start_timeout)
            starting = self._start(worker, spec, allocation, dict(environment or {}), start_timeout)
            self._starting = starting, start_timeout
            if wait:
                self.wait_started()
        except BaseException:
            self._kill()
            raise

    def wait_started(self) -> None:
        """Return when all workers are built; what fails is raised as by the constructor."""
        starting, timeout = self._starting
        starting.wait(max(0.0, starting.began + timeout - time.monotonic()))

    def started(self) -> bool:
        """True where `wait_started` would return or raise at once, also because the start has taken too long."""
        starting, timeout = self._starting
        return starting.done() or time.monotonic() > starting.began + timeout

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    @property
    def log_paths(self) -> list[str]:
        """Paths of each rank's output, on its own node."""
        return [rank.log_path for rank in self._ranks]

    @property
    def pids(self) -> list[int]:
        """Process id of each rank, on its own node."""
        return [rank.pid for rank in self._ranks]

    def call(
        self, method: str, per_rank: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any] | None = None
    ) -> RayPendingResult:
        worker_group.check_per_rank(per_rank, self.world_size, method)
        self._check_running(method)
        stored: dict[tuple[int, ...], Any] = {}
        keys = [tuple(map(id, args)) for args in per_rank]
        for key, args in zip(keys, per_rank, strict=True):  # what several ranks get alike is sent once
            if key not in stored:
                stored[key] = ray.put(args)
        shared = ray.put(dict(kwargs or {}))
        refs = [
            rank.actor.call.remote(method, stored[key], shared) for rank, key in zip(self._ranks, keys, strict=True)
        ]
        return self._pending(method, refs)

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> RayPendingResult:
        return self.call(method, [args] * self.world_size, kwargs)

    def shutdown(self) -> None:
        if self.stopped_by is not None or not ray.is_initialized():
            return
        busy = any(not result.done() for result in self._outstanding)
        stops = {rank.actor.stop.remote(): index for index, rank in enumerate(self._ranks)}
        self.stopped_by = worker_group.GroupStopped("shutdown() was called", rank=0, method="shutdown")
        ready, late = ray.wait(
            list(stops), num_returns=len(stops), timeout=_BUSY_STOP_SECONDS if busy else _STOP_SECONDS
        )
        _report_stops({stops[ref]: ref for ref in ready}, sorted(stops[ref] for ref in late))
        self._kill()

    def watch(self, target: RayPendingResult, timeout: float | None) -> None:
        """Return when `target` is complete; raise WorkerError at any rank's failure, in whatever call."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while target.waiting:
            if self.stopped_by is not None:
                raise self._stopped(target.method)
            self._outstanding = [result for result in self._outstanding if result.waiting]
            owner = {ref: result for result in self._outstanding for ref in result.waiting}
            patience = min(_LOOK_SECONDS, self._watchdog.interval_s)
            if deadline is not None:
                patience = max(0.0, min(patience, deadline - time.monotonic()))
            ready, _ = ray.wait(list(owner), num_returns=1, timeout=patience)
            failures = [failure for ref in ready if (failure := owner[ref].take(ref)) is not None]
            if failures:
                self._fail(failures, owner)
            if not ready and deadline is not None and time.monotonic() >= deadline:
                self._fail_late(target, timeout or 0.0)
            elif not ready:
                self._mention_stopped(target)
                self._watchdog.look()

    def _place(self, allocation: Allocation, log_dir: Path, name: str, timeout: float) -> None:
        """Learn where the actors are, and order the ranks of each node by GPU."""
        described = [rank.actor.describe.remote() for rank in self._ranks]
        for index, (rank, ref) in enumerate(zip(self._ranks, described, strict=True)):
            what = f"a worker process on node {rank.address}"
            try:
                facts = ray.get(ref, timeout=timeout)
            except GetTimeoutError as error:
                what += f" did not start within {timeout:g} s (trainer.worker_start_timeout)"
                raise worker_group.WorkerTimeout(what, rank=index, method="start") from error
            except RayError as error:
                what += f" could not be started: {error}"
                raise worker_group.WorkerDied(what, rank=index, method="start") from error
            rank.pid, rank.raylet_pid, rank.gpus = facts["pid"], facts["parent_pid"], facts["gpus"]
        self._ranks.sort(key=lambda rank: (rank.node_rank, [(len(gpu), gpu) for gpu in rank.gpus]))
        for index, rank in enumerate(self._ranks):
            rank.log_path = str(log_dir / f"{name}_rank{index}.log")

    def _start(
        self, worker: str, spec: Any, allocation: Allocation, environment: dict[str, str], timeout: float
    ) -> RayPendingResult:
        first = self._ranks[0]
        single_node = len(allocation.nodes) == 1
        alone = sum(node["Alive"] for node in ray.nodes()) == 1  # this machine is the whole cluster
        _register_transport()
        try:
            port = ray.get(first.actor.free_port.remote(), timeout=timeout)
        except (RayActorError, GetTimeoutError) as error:
            what = f"{self.name} rank 0 ended before it began, or did not answer: {error}"
            raise worker_group.WorkerError(what, rank=0, method="start") from error
        pickled = ray.put(cloudpickle.dumps(spec))
        refs = []
        for index, rank in enumerate(self._ranks):
            rank_env = worker_group.RankEnv(
                rank=index,
                world_size=self.world_size,
                local_rank=index % allocation.ranks_per_node,
                local_world_size=allocation.ranks_per_node,
                node_rank=rank.node_rank,
                master_address=LOOPBACK if single_node else first.address,
                master_port=port,
                run_id=self.run_id,
                device=allocation.device,
                address=LOOPBACK if alone else rank.address,
                group=self.name,
            )
            request = StartRequest(
                worker=worker,
                rank_env=rank_env,
                cuda_devices=tuple(g for r in self._ranks if r.node_rank == rank.node_rank for g in r.gpus),
                environment={**forwarded_environment(os.environ), **environment},
                log_path=rank.log_path,
                working_directory=os.getcwd(),
                stall_timeout=self._watchdog.stall_timeout,
            )
            refs.append(rank.actor.start.remote(request, pickled))
        return self._pending("start", refs)

    def _pending(self, method: str, refs: Sequence[Any]) -> RayPendingResult:
        result = RayPendingResult(self, method, refs)
        self._outstanding.append(result)
        return result

    def _check_running(self, method: str) -> None:
        if self.stopped_by is not None:
            raise self._stopped(method)

    def _stopped(self, method: str) -> worker_group.GroupStopped:
        cause = self.stopped_by
        reason = str(cause).splitlines()[0]
        rank = cause.rank if cause is not None else 0
        return worker_group.GroupStopped(f"{method}: the worker group is stopped: {reason}", rank=rank, method=method)

    def _fail(self, failures: list[Failure], owner: Mapping[Any, RayPendingResult]) -> None:
        """Collect what other ranks report in the next moments, kill all, raise the most telling failure."""
        deadline = time.monotonic() + _ECHO_SECONDS
        reported = {failure.rank for failure in failures}
        while len(reported) < self.world_size and (remaining := deadline - time.monotonic()) > 0:
            open_refs = [ref for ref, result in owner.items() if ref in result.waiting]
            ready, _ = ray.wait(open_refs, num_returns=1, timeout=remaining) if open_refs else ([], [])
            if not ready:
                break
            for ref in ready:
                failure = owner[ref].take(ref)
                if failure is not None and failure.rank not in reported:
                    failures.append(failure)
                    reported.add(failure.rank)
        if all(failure.is_echo for failure in failures):  # they waited for somebody
            silent = set(range(self.world_size)) - reported
            method = failures[0].method
            failures += [Failure.of_stopped_process(r, method, self._ranks[r].pid) for r in self._stopped_ranks(silent)]
        failures = [self._of_node(failure) for failure in failures]
        logs = {f.rank: self._ranks[f.rank].log_path for f in failures}
        tails = {f.rank: f.log_tail or log_tail(self._ranks[f.rank].node_id, logs[f.rank]) for f in failures}
        self._kill()
        try:
            raise_for(failures, world_size=self.world_size, name=self.name, logs=logs, tails=tails)
        except worker_group.WorkerError as error:
            self.stopped_by = error
            raise

    def _stopped_ranks(self, ranks: Iterable[int]) -> list[int]:
        """List the ranks whose processes are stopped (SIGSTOP, a debugger)."""
        chosen = [(index, self._ranks[index]) for index in sorted(ranks)]
        return [index for index, rank in chosen if process_state(rank.node_id, rank.pid) == "T"]

    def _mention_stopped(self, target: RayPendingResult) -> None:
        """Tell the user of ranks on this machine that are stopped, long before the time-out: once each."""
        here = ray.get_runtime_context().get_node_id()
        waiting = {rank for rank in target.waiting.values() if self._ranks[rank].node_id == here}
        for rank in self._stopped_ranks(waiting - self._mentioned):
            self._mentioned.add(rank)
            logger.warning("rank %d %s; %s() waits for it", rank, stopped_text(self._ranks[rank].pid), target.method)

    def _of_node(self, failure: Failure) -> Failure:
        """Tell the failure as the node's where a process died with its raylet.

        That is seen on this machine alone; of another one Ray's own message says so.
        """
        rank = self._ranks[failure.rank]
        here = rank.node_id == ray.get_runtime_context().get_node_id()
        if failure.kind != "died" or not here or process_state(rank.node_id, rank.raylet_pid) != "":
            return failure
        return failure.on_lost_node(rank.address, rank.raylet_pid)

    def _fail_late(self, target: RayPendingResult, timeout: float) -> None:
        late = sorted(target.waiting.values())
        stopped = self._stopped_ranks(late)
        late = [*stopped, *(rank for rank in late if rank not in stopped)]
        first = self._ranks[late[0]]
        cause = "".join(f"; rank {rank} {stopped_text(self._ranks[rank].pid)}" for rank in stopped)
        tail = stack_tail(first.node_id, first.pid, first.log_path)
        setting = "trainer.worker_start_timeout" if target.method == "start" else "trainer.rpc_timeout"
        error = worker_group.WorkerTimeout(
            f"{target.method}() was not answered within {timeout:g} s ({setting}) by {self.name} rank(s) "
            f"{', '.join(map(str, sorted(late)))} of {self.world_size}{cause}",
            rank=late[0],
            ranks=late,
            method=target.method,
            log_path=first.log_path,
            log_tail=tail,
        )
        self.end(error)

    def asked_to_stop(self, rank: int) -> None:
        """True where a rank got a SIGTERM."""
        if not self._passed_on:
            self._passed_on = True
            pass_on_sigterm(f"{self.name} rank {rank}")

    def watched(self) -> list[Watched]:
        """List the group's ranks for the watchdog; none during the start, which has a time limit of its own."""
        if self.stopped_by is not None:
            return []
        calls: dict[int, dict[str, Any]] = {}
        for result in self._outstanding:
            for rank in result.waiting.values() if result.method != "start" else ():
                calls.setdefault(rank, {"called": [], "asked": result.began})["called"].append(result.method)
        about = {"pool": self.name, "size": self.world_size}
        return [
            Watched(**about, rank=i, node_id=r.node_id, pid=r.pid, log_path=r.log_path, **calls.get(i, {}))
            for i, r in enumerate(self._ranks)
        ]

    def end(self, error: worker_group.WorkerError) -> NoReturn:
        """Stop all ranks, and raise `error`, which later calls name as the reason."""
        self._kill()
        self.stopped_by = error
        raise error

    def _kill(self) -> None:
        """End all worker processes, and see on this machine that they are gone."""
        for rank in self._ranks:
            ray.kill(rank.actor, no_restart=True)
        here = ray.get_runtime_context().get_node_id()
        pids = [rank.pid for rank in self._ranks if rank.node_id == here and rank.pid]
        deadline = time.monotonic() + _GONE_SECONDS
        while any(map(_running, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        kill_processes([pid for pid in pids if _running(pid)])
        cleanup_shm(worker_group.memory_id(self.run_id, self.name))


def _register_transport() -> None:
    # It imports torch: not before the environment is set
    from verl_like.cluster.transport import register_tensor_transport

    register_tensor_transport()


def forwarded_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The driver's settings of torch, vLLM and friends, which workers on other nodes would not see otherwise."""
    return {
        name: value
        for name, value in variables.items()
        if (name.startswith(_FORWARDED_PREFIXES) or name in _FORWARDED_NAMES) and name not in _NOT_FORWARDED
    }


def _create_actors(allocation: Allocation, runtime_env: Mapping[str, Any] | None) -> list[_Rank]:
    ranks = []
    for node_rank, node in enumerate(allocation.nodes):
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=allocation.placement_group, placement_group_bundle_index=node.bundle_index
        )
        for _ in range(allocation.ranks_per_node):
            actor = (
                ray.remote(_RayRank)
                .options(
                    name=None,
                    num_cpus=allocation.cpus_per_rank,
                    num_gpus=1 if allocation.device == "cuda" else 0,
                    max_restarts=0,
                    scheduling_strategy=strategy,
                    runtime_env=dict(runtime_env) if runtime_env else None,
                )
                .remote()
            )
            ranks.append(_Rank(actor=actor, node_rank=node_rank, node_id=node.node_id, address=node.address))
    return ranks


def _report_stops(answered: Mapping[int, Any], late: Sequence[int]) -> None:
    if late:
        logger.warning("ranks %s did not stop in time and are killed", late)
    for rank, ref in answered.items():
        try:
            outcome: Outcome = ray.get(ref)
        except RayError as error:
            logger.warning("rank %d was gone before it could stop: %s", rank, type(error).__name__)
            continue
        if outcome.error_type:
            logger.warning("rank %d failed while stopping: %s: %s", rank, outcome.error_type, outcome.message)


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
