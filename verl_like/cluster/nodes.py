"""Small jobs on the machine of a given rank: reading its log, asking a hanging process for its stacks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_like.cluster.rank_process import STACK_SIGNAL, read_tail

_REMOTE_TIMEOUT_SECONDS = 10.0
_STACK_LINES = 60


def log_tail(node_id: str, path: str) -> str:
    """Last lines of a worker's log, wherever it lies; a note instead when its node does not answer."""
    return read_tail(path) or _on_node(node_id, read_tail, path)


def stack_tail(node_id: str, pid: int, path: str) -> str:
    """Have a process write the stacks of its threads to its log, and return the end of that log."""
    return _on_node(node_id, _dump_stacks, pid, path)


def _dump_stacks(pid: int, path: str) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
        time.sleep(0.5)
    return read_tail(path, _STACK_LINES)


def _on_node(node_id: str, function: Callable[..., str], *args: Any) -> str:
    if node_id == ray.get_runtime_context().get_node_id():
        return function(*args)
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    try:
        return ray.get(task.remote(*args), timeout=_REMOTE_TIMEOUT_SECONDS)
    except RayError as error:
        return f"(could not be read: node {node_id[:8]} did not answer: {type(error).__name__})"
