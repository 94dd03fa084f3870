"""Checkpoint files written by a thread while training goes on (`checkpoint.async_save`)."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from verl_like.engine import state

Part = tuple[dict[str, Tensor], Path]  # shards by name, and the folder they go to


class BackgroundWriter:
    """Copies shards to host memory at once and writes them later, one checkpoint at a time.

    Writing is collective: the thread has a process group of its own, so that its messages never meet the trainer's.
    Building one is collective.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def write(self, parts: list[Part]) -> None:
        """Begin; waits for the checkpoint before it, so that at most one copy is in host memory."""
        self.wait()
        copies = [({name: t.detach().to("cpu", copy=True) for name, t in part.items()}, to) for part, to in parts]
        self._written = self._thread.submit(self._write, copies)

    def done(self) -> bool:
        """Whether nothing is being written. Raises what the writing raised."""
        if self._written is None:
            return True
        if self._written.done():
            self.wait()
            return True
        return False

    def wait(self) -> None:
        """Until everything is written. Raises what the writing raised."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _write(self, parts: list[Part]) -> None:
        for tensors, folder in parts:
            state.save_sharded(tensors, folder, group=self._group)
