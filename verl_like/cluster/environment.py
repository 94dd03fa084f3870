"""Environment variables of a worker process. They must be set before torch or vLLM is imported in it."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from verl_like.cluster.worker_group import RUN_ID_VARIABLE, RankEnv

LOOPBACK = "127.0.0.1"
# Below the kernel's ephemeral ports and above those Ray hands to its workers, so that neither takes the port between
# our probe and the worker's bind.
_PORT_RANGE = (20_000, 32_000)
_MAX_GPU_HOST_THREADS = 16


def process_environment(rank_env: RankEnv, *, cuda_devices: Sequence[str] = ()) -> dict[str, str]:
    """Make the environment variables that torch.distributed, vLLM and OpenMP read, for one rank.

    cuda_devices: ids of all GPUs of this node's ranks, in local-rank order. Every rank sees all of them and picks its
        own by LOCAL_RANK, as under torchrun: peer access and vLLM's external launcher need that.
    """
    variables = {
        "RANK": str(rank_env.rank),
        "LOCAL_RANK": str(rank_env.local_rank),
        "WORLD_SIZE": str(rank_env.world_size),
        "LOCAL_WORLD_SIZE": str(rank_env.local_world_size),
        "GROUP_RANK": str(rank_env.node_rank),
        "MASTER_ADDR": rank_env.master_address,
        "MASTER_PORT": str(rank_env.master_port),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": ",".join(cuda_devices),
        RUN_ID_VARIABLE: rank_env.run_id,
    }
    if rank_env.master_address == LOOPBACK:
        # gloo looks its interface up by host name, which fails on machines whose name does not resolve.
        variables["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    return variables


def omp_threads(local_world_size: int, device: str) -> int:
    """OpenMP threads of one rank: its share of the cores it may use; on GPU machines no more than 16."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    share = max(1, cores // local_world_size)
    return min(share, _MAX_GPU_HOST_THREADS) if device == "cuda" else share


def free_port(address: str = "") -> int:
    """A TCP port that nothing listens on now."""
    generator = random.SystemRandom()
    for _ in range(200):
        port = generator.randint(*_PORT_RANGE)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free TCP port between {_PORT_RANGE[0]} and {_PORT_RANGE[1]}")


@contextmanager
def patched_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, and put the old values back at the end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
