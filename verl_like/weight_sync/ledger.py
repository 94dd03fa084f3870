"""Book-keeping of a weight stream on our side of the loader: what should come, what came, and its checksums.

The engine's own list of loaded names is no proof: vLLM reports a fused qkv_proj as loaded when k_proj never came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from verl_like.parallel.checksum import checksum, values_of
from verl_like.weight_sync.header import Header


class WeightLedger:
    """Passes a stream on and accounts for every tensor. Faulty tensors are noted and not passed on, so that the stream
    (a collective of all ranks) is read to its end on every rank."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._seen: set[str] = set()
        self._problems: list[str] = []
        self._sums: dict[str, Tensor] = {}  # int64, without dimensions
        self.num_bytes = 0

    @property
    def num_tensors(self) -> int:
        return len(self._seen)

    def watch(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The good tensors of `stream`, cast to the rollout dtype; one at a time is alive here."""
        for name, tensor in stream:
            if self._accept(name, tensor):
                tensor = tensor.to(self._header.dtype) if tensor.is_floating_point() else tensor
                self.num_bytes += tensor.numel() * tensor.element_size()
                if self._header.checksums is not None:
                    self._sums[name] = checksum(tensor)
                yield name, tensor
            del tensor

    def problems(self) -> list[str]:
        """What was wrong with tensors that came, and what did not come; call after the end of the stream."""
        missing = [f"missing: {name}" for name in self._header.shapes if name not in self._seen]
        found = list(zip(self._sums, values_of(list(self._sums.values())), strict=True))
        return self._problems + missing + self._differences(found, "differs from the trainer's shards")

    def differences(self, held: list[tuple[str, int]]) -> list[str]:
        """Names whose tensor, as the engine holds it, is not what the trainer's shards hold."""
        return self._differences(held, "differs in the rollout engine")

    def _differences(self, found: list[tuple[str, int]], what: str) -> list[str]:
        sums = self._header.checksums or {}
        wrong = dict.fromkeys(name for name, number in found if sums.get(name, number) != number)
        return [f"{what}: {name}" for name in wrong]

    def _accept(self, name: str, tensor: Tensor) -> bool:
        shapes = self._header.shapes
        if name not in shapes:
            self._problems.append(f"unexpected: {name}")
        elif name in self._seen:
            self._problems.append(f"duplicate: {name}")
        elif tensor.shape != shapes[name]:
            self._problems.append(f"shape: {name} is {tuple(tensor.shape)}, not {tuple(shapes[name])}")
        else:
            self._seen.add(name)
            return True
        return False
