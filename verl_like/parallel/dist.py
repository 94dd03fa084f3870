"""Start and stop torch.distributed in one worker process."""

from __future__ import annotations

import datetime
import os
import random
import socket
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from verl_like.parallel.host_memory import keep_freed_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """Place of this process in its worker group."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


def init_distributed(
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    master_address: str,
    master_port: int,
    device: str,
    timeout_s: float = 600.0,
    deterministic_seed: int | None = None,
) -> ProcessInfo:
    """Set the environment torchrun would set and join the process group (a group of one included).

    On a CPU the process also keeps the memory it frees (host_memory.py).

    Args:
        rank: number of this process among all.
        world_size: number of processes.
        local_rank: number of this process on its machine.
        local_world_size: number of processes on this machine.
        master_address: where the processes meet.
        master_port: port there; 0 finds a free one for a group of one.
        device: "cpu" (gloo) or "cuda" (nccl for GPU tensors, gloo for CPU tensors).
        timeout_s: seconds that the group may take to assemble, and a collective to finish.
        deterministic_seed: for trainer.full_determinism; None leaves torch as it is.

    Raises ValueError for another device or a missing GPU, and whatever torch raises when the group does not assemble in
    time.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"trainer.device={device!r} is not a device of a worker: use 'cpu' or 'cuda'")
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(local_world_size),
        MASTER_ADDR=master_address,
        MASTER_PORT=str(master_port),
    )
    if deterministic_seed is not None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        _deterministic_algorithms(True)
        seed = deterministic_seed + rank
        random.seed(seed)  # for code of the user's: our own draws have generators
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
    torch_device = torch.device("cpu")
    if device == "cpu":
        keep_freed_memory()
    else:
        torch_device = torch.device("cuda", _cuda_index(local_rank))
        torch.cuda.set_device(torch_device)  # before nccl starts: it uses the current device
    timeout = datetime.timedelta(seconds=timeout_s)
    # The group is not bound to the device (device_id): torch would then have every rank outside a new group take part
    # in an ncclCommSplit, gloo groups included, whose members never do; vLLM and the step loop make such groups.
    dist.init_process_group(
        backend="gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        store=_loopback_store(rank, world_size, master_port, timeout) if master_address == "127.0.0.1" else None,
    )
    return ProcessInfo(rank=rank, world_size=world_size, local_rank=local_rank, device=torch_device)


def shutdown_distributed() -> None:
    """Leave the process group; shut the rollout engine down before."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if torch.are_deterministic_algorithms_enabled():  # in the driver's own process another run may follow
        _deterministic_algorithms(False)


def _loopback_store(rank: int, world_size: int, port: int, timeout: datetime.timedelta) -> dist.Store:
    """Open the store that torch.distributed meets at, on this machine alone: torch's own listens to every network."""
    listener = None
    if rank == 0:
        server = socket.create_server(("127.0.0.1", port))
        port = server.getsockname()[1]  # of 0, the one that was found
        listener = server.detach()  # the store's from here on
    options = {"timeout": timeout, "wait_for_workers": False, "master_listen_fd": listener}
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, **options)
    return dist.PrefixStore("default", store)


def _deterministic_algorithms(on: bool) -> None:
    # What has no deterministic form warns: vLLM's operations in this process are torch's too.
    torch.use_deterministic_algorithms(on, warn_only=on)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = on, False


def all_reduce_max(value: int) -> int:
    """The largest `value` of all ranks (collective, on a CPU tensor)."""
    largest = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _cuda_index(local_rank: int) -> int:
    """Index of this process's GPU. Ray shows a worker only its own, number 0; a plain launcher shows all of them."""
    visible = torch.cuda.device_count()
    if visible == 0:
        raise ValueError("trainer.device='cuda', but torch sees no GPU here: use trainer.device=cpu")
    if visible > 1 and local_rank >= visible:
        raise ValueError(f"local rank {local_rank} has no GPU of its own: torch sees {visible}")
    return local_rank if visible > 1 else 0
