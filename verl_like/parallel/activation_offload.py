"""Keep what the backward pass needs in host memory until it runs (`model.enable_activation_offload`, CUDA).

With gradient checkpointing that is one tensor per layer, its input. Copies to the host run beside the computation on
a stream of their own; weights, which other parts hold anyway, and small tensors stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MIN_BYTES = 1 << 20  # smaller tensors are not worth a copy


class ActivationOffload:
    """Offload of activations to the host, for a CUDA device.

    Use `active()` around a forward pass; its backward pass may run outside. `num_bytes` counts the bytes moved.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.num_bytes = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Move the saved tensors of operations inside to the host, and back when they are asked for."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        if not worth_moving(tensor):
            return tensor
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            done = self._stream.record_event()
        tensor.record_stream(self._stream)
        self.num_bytes += tensor.nbytes
        return _OnHost(host, done, self._device)

    @staticmethod
    def _unpack(packed: Any) -> Tensor:
        return packed() if isinstance(packed, _OnHost) else packed


class _OnHost:
    """Tensor on its way to the host, or there."""

    def __init__(self, host: Tensor, done: torch.cuda.Event, device: torch.device) -> None:
        self._host, self._done, self._device = host, done, device

    def __call__(self) -> Tensor:
        self._done.synchronize()
        return self._host.to(self._device, non_blocking=True)


def worth_moving(tensor: Tensor) -> bool:
    """True for a floating-point activation of some size. Weights are parameters, or views of one."""
    base = tensor._base if tensor._base is not None else tensor
    is_weight = isinstance(base, nn.Parameter)
    return tensor.is_floating_point() and tensor.nbytes >= MIN_BYTES and not is_weight
