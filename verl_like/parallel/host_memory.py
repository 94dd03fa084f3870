"""Memory that a training process frees on a CPU stays with the process, up to a bound.

glibc gives large blocks back to the kernel as soon as they are freed, and the kernel clears every page again when the
next tensor of that size touches it. A training step makes and drops the same tensors over and over, and this costs it
several percent (docs/performance.md). Whoever sets glibc's own variables (MALLOC_*, GLIBC_TUNABLES) keeps what they
say.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform

import torch

log = logging.getLogger(__name__)

# Parameters of mallopt(3), from malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
MAPPED_FROM = 2**29  # [bytes] larger blocks still come from the kernel and go back to it
KEPT_FREE = 2**31 - 1  # [bytes] free memory at the heap's end above which it is given back; mallopt takes an int
_CPU_TEXTS = ("not enough memory", "can't allocate memory")  # of torch's RuntimeError
GROWTH = 2**26  # [bytes] by which the heap grows beyond what is asked for


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep freed memory; False for another malloc, or where the user set glibc's variables."""
    if platform.libc_ver()[0] != "glibc" or _set_by_user():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {_M_MMAP_THRESHOLD: MAPPED_FROM, _M_TRIM_THRESHOLD: KEPT_FREE, _M_TOP_PAD: GROWTH}
    refused = [parameter for parameter, value in settings.items() if mallopt(parameter, value) != 1]
    if refused:
        log.warning("malloc refused the parameters %s: freed memory goes back to the kernel", refused)
    return not refused


def return_freed_memory() -> None:
    """Give back to the kernel what this process has freed, kept or not; nothing with another malloc than glibc's."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """True for CUDA's out-of-memory error, Python's, or torch's on a CPU, which has no class of its own."""
    on_cpu = isinstance(error, RuntimeError) and tells_of_memory(str(error))
    return on_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)


def tells_of_memory(message: str) -> bool:
    """True for the message of torch's out-of-memory error on a CPU."""
    return any(text in message for text in _CPU_TEXTS)


def _set_by_user() -> bool:
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
    return any(name in os.environ for name in names) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
