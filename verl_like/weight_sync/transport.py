"""How tensors get from the trainer to the rollout engine: begin, bucket after bucket, finish.

One transport exists now: in process, where trainer and engine share memory and a bucket is a list of references. The
protocol is shaped so that buckets can travel (CUDA IPC, shared memory, broadcast) without a change on either side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor

from verl_like.rollout.rollout_engine import RolloutEngine

Bucket = list[tuple[str, Tensor]]


class Transport(Protocol):
    """One weight update. The engine is unloaded from `begin` on, and ready when `finish` has returned."""

    def begin(self, version: int, *, partial: bool) -> None:
        """Start an update to `version`; whatever was under way is void. partial: see RolloutEngine.load_weights."""
        ...

    def send(self, buckets: Iterator[Bucket]) -> None:
        """Take all buckets, in order."""
        ...

    def finish(self) -> None:
        """The stream was whole: the engine may generate. Raises RuntimeError without a completed `send`."""
        ...


def in_buckets(stream: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Group consecutive tensors up to `max_bytes`; a larger tensor travels alone."""
    bucket: Bucket = []
    size = 0
    for name, tensor in stream:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket


class InProcessTransport:
    """Trainer and engine in one process: tensors are handed over by reference, one bucket alive at a time."""

    def __init__(self, rollout: RolloutEngine) -> None:
        self._rollout = rollout
        self._version: int | None = None
        self._partial = self._sent = False

    def begin(self, version: int, *, partial: bool) -> None:
        if not partial:
            self._rollout.unload()
        self._version, self._partial, self._sent = version, partial, False

    def send(self, buckets: Iterator[Bucket]) -> None:
        if self._version is None:
            raise RuntimeError("send without begin")
        stream = (item for bucket in buckets for item in bucket)
        self._rollout.load_weights(stream, self._version, partial=self._partial)
        self._sent = True

    def finish(self) -> None:
        if not self._sent:
            raise RuntimeError("finish without a completed send")
        self._version, self._sent = None, False
