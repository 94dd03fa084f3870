"""Freed blocks are taken again instead of mapped anew: counted in page faults, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from verl_like.parallel import host_memory

CODE = """
import resource, sys, torch
from verl_like.parallel.host_memory import keep_freed_memory
kept = keep_freed_memory()
for _ in range(30):  # blocks of several sizes and places come together first
    torch.empty(2**22).fill_(1.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.empty(2**22).fill_(1.0)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 2**24 // os.sysconf("SC_PAGE_SIZE")  # of one tensor


def faults(**variables: str) -> tuple[bool, int]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(host_memory.platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_blocks_are_reused_unless_the_user_says_otherwise() -> None:
    kept, count = faults()
    assert kept and count < PAGES  # 4 tensors, less than one's pages touched for the first time
    kept, count = faults(MALLOC_MMAP_THRESHOLD_="65536")
    assert not kept and count >= 4 * PAGES


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(host_memory.ctypes, "CDLL", None)
    assert not host_memory.keep_freed_memory()
