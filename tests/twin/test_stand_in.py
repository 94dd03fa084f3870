"""The stand-in of torch.cuda itself: what it knows of waits, memory, devices of threads. In processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WAITS = """
side = torch.cuda.Stream()
main = torch.cuda.current_stream()
assert main is torch.cuda.default_stream(0)
step = main.step()
assert side.seen.get(main, 0) < step
side.wait_stream(main)
assert side.seen[main] == step
with torch.cuda.stream(side):
    assert torch.cuda.current_stream() is side
    done = side.record_event() if side.step() else None
assert torch.cuda.current_stream() is main
assert side not in card.host.seen
done.synchronize()
assert card.host.seen[side] == 1
assert main.step() and main.seen[side] == 1  # the host gives work after what it has waited for
late = torch.cuda.Stream()
late.step()
torch.cuda.synchronize()
assert card.host.seen[late] == 1
"""
_MEMORY = """
held = torch.zeros(1024)
card.own(held.untyped_storage(), "cuda:0")
assert torch.cuda.memory_allocated() == 4096 and torch.cuda.mem_get_info(0) == (10_000 - 4096, 10_000)
more = torch.zeros(1024)
card.own(more.untyped_storage(), "cuda:0")
assert torch.cuda.max_memory_allocated() == 8192
try:
    card.own(torch.zeros(1024).untyped_storage(), "cuda:0")
except torch.cuda.OutOfMemoryError as error:
    assert "4096 bytes on cuda:0" in str(error)
else:
    raise AssertionError("10,000 bytes have no room for three")
view = more[:2]
del more
assert torch.cuda.memory_allocated() == 8192  # a view keeps the whole
del view, held
assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() == 8192
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() == 0 and torch.cuda.memory_allocated(1) == 0
"""
_THREADS = """
import threading
seen = []
def other():
    torch.cuda.set_device("cuda:1")
    seen.extend((torch.cuda.current_device(), torch.cuda.current_stream() is torch.cuda.default_stream(1)))
thread = threading.Thread(target=other)
thread.start()
thread.join()
assert seen == [1, True] and torch.cuda.current_device() == 0
with torch.cuda.device(1):
    assert torch.cuda.current_device() == 1
assert torch.cuda.device_count() == 2 and torch.cuda.get_device_name() == "NVIDIA H200"
torch.cuda.empty_cache()
assert card.calls["empty_cache"] == 1
"""
_FAKE = """
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
fake_tensor.init_gpu_context = lambda device: None  # in torch's CUDA build a real tensor on the device
FakeTensorMode.avoid_device_init = property(lambda mode: True)
with FakeTensorMode() as mode:
    x = torch.ones(4, 8, device="cuda")
    y = torch.tensor([1.0], device="cuda") * x
    assert y.device == torch.device("cuda", 0)
    card.own(y.untyped_storage(), "cuda:0")
    assert torch.cuda.memory_allocated() == 128
    del y
    assert torch.cuda.memory_allocated() == 0
"""


@pytest.mark.parametrize("text", [_WAITS, _MEMORY, _THREADS, _FAKE], ids=["waits", "memory", "threads", "fake"])
def test_the_stand_in_knows(text: str) -> None:
    start = "import torch\nfrom tests.twin import stand_in\ncard = stand_in.install(2, capacity=10_000)\n"
    done = subprocess.run([sys.executable, "-c", start + text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
