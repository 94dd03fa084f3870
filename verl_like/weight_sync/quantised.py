"""The proof of weights that an engine quantises as they come: what it computes with, dequantised, is what was sent.

A checksum cannot say that. So of every matrix that comes a sketch is kept, and how large the format's rounding may make
a difference; afterwards the engine gives sketches of its dequantised weights. Two tests: no row's difference is beyond
chance (a wrong scale of one row, rows exchanged, zeros), and both agree in size (one scale for all, slightly wrong).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from verl_like.parallel.checksum import Slice
from verl_like.parallel.sketch import blocks, sketch

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
        """What is wrong with the engine's dequantised weights: (name, sketch [R, K])."""
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
    """How many times as large what was found is, by least squares, and that number's deviation."""
    total = float(sent_RK.square().sum())
    if total == 0:
        return 1.0, 0.0
    noise = math.sqrt(float((sent_RK * deviation_R1).square().sum())) / total
    return float((found_RK * sent_RK).sum()) / total, noise


def _deviation(tensor_RC: Tensor, kind: str) -> Tensor:
    """Of an entry of each row's sketch, when every number is rounded by itself: float64 [R, 1]."""
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
