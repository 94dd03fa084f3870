"""Book-keeping of a weight stream on our side of the loader: what should come, what came, and its checksums.

The engine's own list of loaded names is no proof: vLLM reports a fused qkv_proj as loaded when k_proj never came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from verl_like.weight_sync.checksum import checksum, values


class WeightLedger:
    """Passes a stream on and accounts for every tensor. Faulty tensors are noted and not passed on, so that the stream
    (a collective of all ranks) is read to its end on every rank."""

    def __init__(self, expected: dict[str, torch.Size], dtype: torch.dtype, *, with_checksums: bool) -> None:
        self._expected = expected
        self._dtype = dtype
        self._with_checksums = with_checksums
        self._seen: set[str] = set()
        self._problems: list[str] = []
        self.checksums: dict[str, Tensor] = {}  # int64, without dimensions
        self.num_bytes = 0

    @property
    def num_tensors(self) -> int:
        return len(self._seen)

    def watch(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The good tensors of `stream`, cast to the rollout dtype."""
        for name, tensor in stream:
            if self._accept(name, tensor):
                tensor = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
                self.num_bytes += tensor.numel() * tensor.element_size()
                if self._with_checksums:
                    self.checksums[name] = checksum(tensor)
                yield name, tensor

    def faults(self) -> list[str]:
        """What was wrong with tensors that came."""
        return self._problems

    def missing(self) -> list[str]:
        """What did not come; call after the end of the stream."""
        return [f"missing: {name}" for name in self._expected if name not in self._seen]

    def differences(self, held: dict[str, Tensor]) -> list[str]:
        """Names whose tensor, as the engine holds it, is not what was sent."""
        names = [name for name in held if name in self.checksums]
        found = values([checksum(held[name]) for name in names])
        sent = values([self.checksums[name] for name in names])
        return [f"differs in the rollout engine: {n}" for n, a, b in zip(names, found, sent, strict=True) if a != b]

    def _accept(self, name: str, tensor: Tensor) -> bool:
        if name not in self._expected:
            self._problems.append(f"unexpected: {name}")
        elif name in self._seen:
            self._problems.append(f"duplicate: {name}")
        elif tensor.shape != self._expected[name]:
            self._problems.append(f"shape: {name} is {tuple(tensor.shape)}, not {tuple(self._expected[name])}")
        else:
            self._seen.add(name)
            return True
        return False
