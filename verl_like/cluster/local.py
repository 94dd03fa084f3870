"""A worker group of one rank in this process: the same loop without Ray, for debuggers, tests and documentation."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from verl_like.cluster import worker_group
from verl_like.cluster.environment import LOOPBACK, free_port, patched_environment, process_environment
from verl_like.cluster.janitor import cleanup_shm


class LocalResult:
    """A call that was already executed; its error waits for `wait`, as it would with remote ranks."""

    def __init__(self, value: Any = None, error: worker_group.WorkerError | None = None) -> None:
        self._value = value
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> list[Any]:
        if self._error is not None:
            raise self._error
        return [self._value]


class LocalWorkerGroup:
    """One rank in this process. Arguments and results are passed by reference, calls run at once.

    worker: import path "package.module:Class", or any callable (spec, rank_env) -> worker. Environment variables of the
    rank are set for the life of the group. An error in the constructor raises WorkerError, as in a remote group.
    """

    def __init__(
        self,
        worker: str | Callable[[Any, worker_group.RankEnv], Any],
        spec: Any = None,
        *,
        device: str = "cpu",
        run_id: str | None = None,
    ) -> None:
        self.run_id = run_id or worker_group.new_run_id()
        self._stack = ExitStack()
        self._stopped_by: worker_group.WorkerError | None = None
        self._worker: Any = None
        rank_env = worker_group.RankEnv(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            master_address=LOOPBACK,
            master_port=free_port(LOOPBACK),
            run_id=self.run_id,
            device=device,
        )
        self._stack.enter_context(patched_environment(_variables(rank_env)))
        try:
            factory = worker_group.resolve_import_path(worker) if isinstance(worker, str) else worker
            self._worker = factory(spec, rank_env)
        except Exception as error:
            self._stack.close()
            raise _wrap(error, "start") from error

    @property
    def world_size(self) -> int:
        return 1

    def call(
        self, method: str, per_rank: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any] | None = None
    ) -> LocalResult:
        worker_group.check_per_rank(per_rank, 1, method)
        return self.call_all(method, *per_rank[0], **(kwargs or {}))

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> LocalResult:
        self._check_running(method)
        try:
            return LocalResult(worker_group.method_of(self._worker, method)(*args, **kwargs))
        except Exception as error:
            failure = _wrap(error, method)
            failure.__cause__ = error
            self._stopped_by = failure
            return LocalResult(error=failure)

    def _check_running(self, method: str) -> None:
        if self._stopped_by is not None:
            reason = str(self._stopped_by).splitlines()[0]
            raise worker_group.GroupStopped(f"{method}: the worker group is stopped: {reason}", rank=0, method=method)

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if self._stopped_by is None:
            self._stopped_by = worker_group.GroupStopped("shutdown() was called", rank=0, method="shutdown")
        try:
            if hasattr(worker, "shutdown"):
                worker.shutdown()
        finally:
            self._stack.close()
            cleanup_shm(self.run_id)


def _variables(rank_env: worker_group.RankEnv) -> dict[str, str]:
    variables = process_environment(rank_env)
    if rank_env.device == "cuda":  # the user's own choice of devices stands
        del variables["CUDA_VISIBLE_DEVICES"]
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            variables["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    return variables


def _wrap(error: Exception, method: str) -> worker_group.WorkerError:
    return worker_group.WorkerError(
        f"worker rank 0 of 1 failed in {method}(): {type(error).__name__}: {error}",
        rank=0,
        method=method,
        error_type=type(error).__name__,
        lowered=worker_group.lowered_by(error),
        remote_traceback="".join(traceback.format_exception(error)),
    )
