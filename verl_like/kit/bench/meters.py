"""Meters: the most memory that tensors take while something runs, and the time spent in each of nested calls; and what
a dispatched operator is to others: whom it exchanges messages with, and which line of the trainer asked for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Meter of the most bytes (`peak`) alive at a time in tensors that were made inside, on this thread.

    On CUDA the allocator counts. On a CPU every operation is looked at, which costs time: nothing is timed inside.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.peak = 0
        self._device = device
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self._device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its shards come next
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in before:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


class StageClock:
    """Clock of nested stages.

    seconds: by stage, the time that passed while it was the innermost.
    wait: called at each change of stage, for devices whose work goes on behind the call.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._wait = wait
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Charge the time until the block ends to `name`, but for that of stages opened within."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        self._wait()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


class Staged:
    """Stands in for `target`; the time in its methods goes to the stages that `stages` names, method -> stage.

    A method that yields is charged while it runs, not while its items are used.
    """

    def __init__(self, target: Any, clock: StageClock, stages: dict[str, str]) -> None:
        self._target, self._clock, self._stages = target, clock, stages

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name not in self._stages:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._clock.stage(self._stages[name]):
                result = value(*args, **kwargs)
            return self._charged(result, self._stages[name]) if isinstance(result, Iterator) else result

        return call

    def _charged(self, items: Iterator[Any], stage: str) -> Iterator[Any]:
        while True:
            with self._clock.stage(stage):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


def group_of(func: Any, leaves: Sequence[Any]) -> dist.ProcessGroup | None:
    """Find the ranks that an operator exchanges messages with; None for any other, waits among them.

    leaves: its arguments, and those in lists.
    """
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    groups = [
        dist.ProcessGroup.unbox(leaf)
        for leaf in leaves
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
    ]
    groups += [_resolve_process_group(leaf) for leaf in leaves[-1:] if isinstance(leaf, str)]  # pyright: ignore
    return groups[0] if groups else None


def place(frame: FrameType | None) -> str:
    """File, line and function of the trainer's innermost frame: "engine/fsdp.py:398 FSDPEngine._step"."""
    while frame is not None:
        file = frame.f_code.co_filename.rpartition("/verl_like/")[2]
        if file != frame.f_code.co_filename and not file.startswith("tests/"):
            return f"{file}:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "outside the trainer"
