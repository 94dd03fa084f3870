"""Peak of this process's device: matrix operations and memory traffic a second.

GPUs that are listed are judged by their data sheet (dense bfloat16, as the field quotes utilisation); a CPU, and a GPU
that is not listed, by what a large matrix product and a large copy reach here and now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

# name in torch.cuda.get_device_name() -> (dense bfloat16 operations/s, memory bytes/s); data sheets of the SXM forms.
_DATA_SHEETS = {
    "B200": (2250e12, 8.0e12),
    "H200": (989e12, 4.8e12),
    "H100": (989e12, 3.35e12),
    "H800": (989e12, 3.35e12),
    "H20": (148e12, 4.0e12),
    "A100": (312e12, 2.0e12),
    "A800": (312e12, 2.0e12),
    "L40S": (362e12, 0.864e12),
    "L20": (119.5e12, 0.864e12),
    "A6000": (155e12, 0.768e12),
    "4090": (165e12, 1.008e12),
}

# Bytes a second that one GPU receives over NVLink, half of the data sheets' total of both directions.
_LINKS = {"B200": 900e9, "H200": 450e9, "H100": 450e9, "H800": 200e9, "H20": 450e9, "A100": 300e9, "A800": 200e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """Limits of one device, or of several together."""

    flops: float  # operations a second in matrix products
    bandwidth: float  # bytes a second, read or written
    source: str  # "data sheet" or "measured"

    def times(self, devices: int) -> DevicePeak:
        """Peak of `devices` equal devices together."""
        return DevicePeak(flops=self.flops * devices, bandwidth=self.bandwidth * devices, source=self.source)


def device_peak(device: torch.device, dtype: torch.dtype) -> DevicePeak:
    """Peak of this process's device for products of `dtype`. Measuring takes under a second."""
    if device.type == "cuda":
        sheet = data_sheet(torch.cuda.get_device_name(device))
        if sheet is not None and dtype in (torch.bfloat16, torch.float16):
            return DevicePeak(flops=sheet[0], bandwidth=sheet[1], source="data sheet")
    return measured_peak(device, dtype)


def data_sheet(device_name: str) -> tuple[float, float] | None:
    """Look up (operations/s, bytes/s) of a known GPU, by the longest name that matches, so that H200 is no H20."""
    known = _longest_match(_DATA_SHEETS, device_name)
    return None if known is None else _DATA_SHEETS[known]


def link_bandwidth(device_name: str) -> float | None:
    """Bytes/s that one GPU receives from others of its machine (NVLink, SXM forms); None where it is not known."""
    known = _longest_match(_LINKS, device_name)
    return None if known is None else _LINKS[known]


def known_devices() -> tuple[str, ...]:
    """Names of the GPUs whose data sheets are known."""
    return tuple(_DATA_SHEETS)


def _longest_match(names: Iterable[str], device_name: str) -> str | None:
    return max((name for name in names if name in device_name), key=len, default=None)


def measured_peak(device: torch.device, dtype: torch.dtype) -> DevicePeak:
    """Measure the best of several large matrix products and copies, with torch's threads in this process."""
    side = 8192 if device.type == "cuda" else 1024
    generator = torch.Generator(device).manual_seed(0)  # the global one is the trainer's
    a, b = (torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2))
    product = torch.empty(side, side, device=device, dtype=dtype)
    source = torch.ones(1 << (30 if device.type == "cuda" else 25), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return DevicePeak(
        flops=2.0 * side**3 / _best_seconds(lambda: torch.mm(a, b, out=product), device),
        bandwidth=2.0 * source.numel() / _best_seconds(lambda: target.copy_(source), device),
        source="measured",
    )


def _best_seconds(work: Callable[[], object], device: torch.device, repeats: int = 6) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    best = float("inf")
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - start)
    return best
