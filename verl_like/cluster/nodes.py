"""Small jobs on the machine of a given rank: its log, the stacks of a hanging process, the state of a silent one."""

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
    return read_tail(path) or on_node(node_id, read_tail, path)


def stack_tail(node_id: str, pid: int, path: str) -> str:
    """Have a process write the stacks of its threads to its log, and return the end of that log."""
    return on_node(node_id, _dump_stacks, pid, path)


def process_state(node_id: str, pid: int) -> str:
    """The kernel's letter for what a process does: R runs, S and D wait, T is stopped; "" for one that is gone, or a
    zombie, and "?" where nothing can be learnt (no /proc, no answer)."""
    letter = on_node(node_id, process_state_here, pid)
    return letter if len(letter) <= 1 else "?"


def process_state_here(pid: int) -> str:
    """Read the state of a process of this machine, as `process_state` does."""
    if not os.path.isdir("/proc/self"):
        return "?"
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            letter = file.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""
    return "" if letter in "ZX" else letter.upper()


def _dump_stacks(pid: int, path: str) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
        time.sleep(0.5)
    return read_tail(path, _STACK_LINES)


def on_node(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` on that machine and return its value; a text that says so where its node does not answer."""
    if node_id == ray.get_runtime_context().get_node_id():
        return function(*args)
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    try:
        return ray.get(task.remote(*args), timeout=_REMOTE_TIMEOUT_SECONDS)
    except RayError as error:
        return f"(could not be read: node {node_id[:8]} did not answer: {type(error).__name__})"
