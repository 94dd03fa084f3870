"""A function on every rank of a process group of this machine: here for one rank, in spawned processes for more."""

from __future__ import annotations

import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from verl_like.cluster.environment import LOOPBACK, free_port, omp_threads, patched_environment, process_environment
from verl_like.cluster.worker_group import RankEnv, new_run_id
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed

Result = TypeVar("Result")
_TIMEOUT_S = 1800.0
_OWN_TO_RANK = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")


def on_ranks(
    function: Callable[..., Result], *arguments: Any, num_ranks: int, device: str, threads: int | None = None
) -> list[Result]:
    """Run function(process, run_id, *arguments) on each rank, and return the results in rank order.

    An error on one rank ends all of them and is raised here with its traceback.

    function: a function of a module. Arguments and results can be pickled.
    threads: torch's, of each rank; None: the cores shared evenly.
    """
    port, run_id = free_port(LOOPBACK), new_run_id()
    count = threads or omp_threads(num_ranks, device)
    with patched_environment(_shared_variables(num_ranks, port, run_id, device, count)):
        if num_ranks == 1:
            torch.set_num_threads(count)
            with joined(0, 1, port, device) as process:
                return [function(process, run_id, *arguments)]
        with tempfile.TemporaryDirectory() as folder:
            settings = (num_ranks, port, device, run_id, folder, function, arguments)
            mp.spawn(_rank, args=settings, nprocs=num_ranks, join=True)
            return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(num_ranks)]


@contextmanager
def joined(rank: int, num_ranks: int, port: int, device: str) -> Iterator[ProcessInfo]:
    """The process group, left at the end."""
    process = init_distributed(rank, num_ranks, rank, num_ranks, LOOPBACK, port, device, _TIMEOUT_S)
    try:
        yield process
    finally:
        shutdown_distributed()


def timed(work: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Seconds of `work` on this rank, begun together with the others."""
    _wait(device)
    dist.barrier()
    return elapsed(work, device)


def elapsed(work: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Seconds of `work` in this process; kernels that it has queued are waited for."""
    _wait(device)
    start = time.perf_counter()
    result = work()
    _wait(device)
    return time.perf_counter() - start, result


def slowest(seconds_by_rank: Sequence[Sequence[float]]) -> float:
    """Median over rounds of the slowest rank's seconds; [rank][round], the first round is left out as warm-up."""
    return statistics.median([max(ranks) for ranks in zip(*seconds_by_rank, strict=True)][1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rank(
    rank: int,
    num_ranks: int,
    port: int,
    device: str,
    run_id: str,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    with joined(rank, num_ranks, port, device) as process:
        result = function(process, run_id, *arguments)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))


def _shared_variables(num_ranks: int, port: int, run_id: str, device: str, threads: int) -> dict[str, str]:
    """The environment of all ranks; what differs between them `init_distributed` sets."""
    env = RankEnv(
        rank=0,
        world_size=num_ranks,
        local_rank=0,
        local_world_size=num_ranks,
        node_rank=0,
        master_address=LOOPBACK,
        master_port=port,
        run_id=run_id,
        device=device,
    )
    variables = {name: value for name, value in process_environment(env).items() if name not in _OWN_TO_RANK}
    return variables | {"OMP_NUM_THREADS": str(threads)}
