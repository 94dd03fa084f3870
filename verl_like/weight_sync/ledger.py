"""Book-keeping of a weight stream on our side of the loader: what should come, what came, and its checksums.

The engine's own list of loaded names is no proof: vLLM reports a fused qkv_proj as loaded when k_proj never came.

A checksum cannot tell of weights that an engine quantises as they come that what it computes with, dequantised, is what
was sent. So of every matrix that comes a sketch is kept, and how large the format's rounding may make a difference;
afterwards the engine gives sketches of its dequantised weights. Two tests: no row's difference is beyond chance (a
wrong scale of one row, rows exchanged, zeros), and both agree in size (one scale for all, slightly wrong).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from verl_like.models.checkpoint_names import sent_as
from verl_like.parallel.checksum import Slice, blocks, checksum, sketch, values_of
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
                if tensor.is_floating_point():
                    tensor = tensor.to(sent_as(name, self._header.dtype))
                self.num_bytes += tensor.numel() * tensor.element_size()
                if self._header.checksums is not None:
                    self._sums[name] = checksum(tensor)
                yield name, tensor
            del tensor

    def problems(self) -> list[str]:
        """Problems of tensors that came, and tensors that did not come; call after the end of the stream."""
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


_FP8_STEP, _FP8_LARGEST, _FP8_SMALLEST = 2.0**-4, 448.0, 2.0**-9  # e4m3: share at most; largest; step near 0
_MOST = 8.0  # deviations that a sum of roundings may be away: with 1e9 of them never by chance
_SIZE = 2e-3  # share by which the sizes may differ besides


class QuantisedLedger:
    """Watches a stream on its way to an engine that quantises. kind: of rollout.quantization."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._sent: dict[str, tuple[Tensor, Tensor]] = {}  # sketch [R, K], deviation of its entries [R, 1]

    def watch(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            if tensor.ndim == 2 and name.endswith(".weight"):
                self._sent[name] = sketch(Slice(tensor, 0, 0)), _deviation(tensor, self._kind)
            yield name, tensor
            del tensor

    def differences(self, held: Sequence[tuple[str, Tensor]]) -> list[str]:
        """Problems of the engine's dequantised weights. held: (name, sketch [R, K]) of each."""
        if not held:
            return [f"quantization={self._kind}: no quantised weight of the rollout engine could be read back"]
        problems = []
        for name, found_RK in held:
            sent_RK, deviation_R1 = self._sent[name]
            worst = float(((found_RK - sent_RK) / deviation_R1.clamp(min=1e-30)).abs().max())
            size, about = _ratio(found_RK, sent_RK, deviation_R1)
            if not (worst <= _MOST and abs(size - 1) <= _MOST * about + _SIZE):  # false for NaN
                problems.append(
                    f"{self._kind} weights differ in the rollout engine: {name}, dequantised, is {size:.3g} times what "
                    f"was sent, a row {worst:.3g} deviations of rounding away (limit {_MOST:g})"
                )
        return problems


def _ratio(found_RK: Tensor, sent_RK: Tensor, deviation_R1: Tensor) -> tuple[float, float]:
    """Ratio of the size of what was found to what was sent, by least squares, and that number's deviation."""
    total = float(sent_RK.square().sum())
    if total == 0:
        return 1.0, 0.0
    noise = math.sqrt(float((sent_RK * deviation_R1).square().sum())) / total
    return float((found_RK * sent_RK).sum()) / total, noise


def _deviation(tensor_RC: Tensor, kind: str) -> Tensor:
    """Deviation of an entry of each row's sketch, when every number is rounded by itself: float64 [R, 1]."""
    largest_R, squares_R = (
        torch.cat(found)
        for found in zip(*((rows.abs().amax(1), rows.square().sum(1)) for rows in blocks(tensor_RC)), strict=True)
    )
    if kind == "int8":  # steps of a row are equal
        variance_R = tensor_RC.shape[1] * (largest_R / 127).square() / 12
    else:  # a share of each number, and a step near 0 that one scale for the tensor makes
        step = float(largest_R.max()) / _FP8_LARGEST * _FP8_SMALLEST
        variance_R = (squares_R * _FP8_STEP**2 + tensor_RC.shape[1] * step**2) / 3
    return variance_R.sqrt()[:, None].cpu()
