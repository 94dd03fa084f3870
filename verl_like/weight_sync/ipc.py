"""Weights to an engine in another process of the same machine, on the same device: both see the same two buckets.

CUDA: memory that both map, by the handles of torch.multiprocessing. CPU: files in /dev/shm, named with the run's id, so
that the janitor finds what a killed process left.
"""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import tempfile
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing  # it teaches ForkingPickler what a CUDA tensor is
from torch import Tensor

from verl_like.weight_sync.wired import Deadline, Way, WiredReceiver, WiredSender

_LOOPBACK = "127.0.0.1"
_SHARED = Path("/dev/shm")


class IpcSender(WiredSender):
    """On every rank of the trainer that has an engine's process beside it. settings: see WiredSender."""

    def __init__(self, receiver: str, *, run_id: str, **settings: Any) -> None:
        super().__init__(_LOOPBACK, [receiver], **settings)
        self._run_id = run_id
        self._files: dict[int, Path] = {}
        self._told: set[int] = set()  # slots that the receiver has opened

    def _memory(self, place: int, size: int) -> Tensor:
        self._told.discard(place)
        if self._device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        self._remove(place)
        folder = _SHARED if _SHARED.is_dir() else Path(tempfile.gettempdir())
        self._files[place] = path = folder / f"psm_{self._run_id}_{secrets.token_hex(4)}"
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)  # or a full /dev/shm would end the process at the first write
        except OSError as error:
            raise OSError(
                f"{folder} has no room for a bucket of {size >> 20} MB ({shutil.disk_usage(folder).free >> 20} MB are "
                "free): lower actor_rollout_ref.rollout.update_weights_bucket_megabytes, or give it more (--shm-size)"
            ) from error
        finally:
            os.close(handle)
        return _mapped(str(path), size)

    def _place(self) -> tuple[int, Any]:
        """Number of the slot, and what opens it, where the receiver has not seen it yet."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        place = (self._num_buckets - 1) % len(self._slots)
        if place in self._told:
            return place, None
        self._told.add(place)
        slot = self._slots[place]
        assert slot is not None
        if self._device.type == "cuda":
            return place, bytes(ForkingPickler.dumps(slot))
        return place, (str(self._files[place]), slot.numel())

    def _release(self) -> None:
        self._told.clear()
        for place in list(self._files):
            self._remove(place)

    def _remove(self, place: int) -> None:
        path = self._files.pop(place, None)
        if path is not None:
            path.unlink(missing_ok=True)


class IpcReceiver(WiredReceiver):
    """In the engine's process. Tensors are copied out of the buckets, since loaders may keep them."""

    def __init__(self, way: Way, rank: int, device: torch.device) -> None:
        super().__init__(way, rank, device)
        self._slots: dict[int, Tensor] = {}

    def _get(self, size: int, place: Any, deadline: Deadline) -> Tensor:
        number, opens = place
        if isinstance(opens, bytes):
            self._slots[number] = pickle.loads(opens)
        elif opens is not None:
            self._slots[number] = _mapped(*opens)
        return self._slots[number][:size]

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def _taken(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _release(self) -> None:
        self._slots.clear()


def _mapped(path: str, size: int) -> Tensor:
    """The file's bytes, which stay when it is removed. torch alone would make the file anew where it is gone."""
    handle = os.open(path, os.O_RDWR)
    try:
        return torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(handle)
