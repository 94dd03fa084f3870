"""Peak memory of a process by phase: what a run measures beside its forecast (kit/forecast/memory.py).

On CUDA torch's own count of allocated bytes, on a CPU (Linux) the growth of the resident size over what the process had
when it had only imported its modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_GIB = 1024**3


class PhaseMemory:
    """Peaks of one rank's phases since they were last taken."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._base = device, reset_peak(device) or 0
        self._peaks: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, without: int = 0) -> Iterator[None]:
        """Record the most memory that is allocated at once in the block as this phase's.

        without: bytes that do not count.
        """
        reset_peak(self._device)
        yield
        peak = peak_bytes(self._device)
        if peak is not None:
            grown = (peak - without if self._device.type == "cuda" else peak - self._base) / _GIB
            self._peaks[name] = max(grown, self._peaks.get(name, 0.0))

    def take(self) -> dict[str, float]:
        """Report perf/memory_peak/<phase> in GiB, and start counting anew."""
        taken, self._peaks = self._peaks, {}
        return {f"perf/memory_peak/{name}": value for name, value in taken.items()}


def reset_peak(device: torch.device) -> int | None:
    """Start counting anew; bytes in use now. None where nothing can be known."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        # Linux: the largest resident size becomes the present one (proc(5))
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # another system, or a container that forbids it
        return None
    return _status("VmRSS")


def allocated_bytes(device: torch.device) -> int:
    """Count the bytes that torch has allocated on a CUDA device; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes in use since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> int | None:
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":")), None)
