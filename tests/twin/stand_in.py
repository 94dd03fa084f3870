"""Stand-in for torch.cuda on a machine without a card: streams and events that know who waited for whom, and memory.

    from tests.twin import stand_in
    card = stand_in.install()        # before anything is built; torch.cuda.is_available() is True from then on

Two suites put their own arithmetic behind it: fake tensors on cuda, or cuda turned into cpu. They tell the card what
memory there is (`card.own`); `Lane.seen` lets them tell a wait that is missing.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class Event:
    """A moment of a lane. seen: by lane, the number of its last step that was known to be over at that moment."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seen: dict[Lane, int] = {}

    def record(self, stream: Lane | None = None) -> None:
        """Take the moment at which the stream is."""
        self.seen = dict((stream or card().stream()).seen)

    def wait(self, stream: Lane | None = None) -> None:
        """Let the stream wait for the moment."""
        (stream or card().stream()).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the moment."""
        card().host.wait_event(self)

    def query(self) -> bool:
        """Answer that everything is over: work runs at once."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two moments: none, since nothing is timed."""
        return 0.0


class Lane(Event):
    """Stream, or the host: what runs in order, and the moment at which it is."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        super().__init__()
        self.device, self.priority, self.cuda_stream = torch.device(place(device)), priority, id(self)
        card().lanes.add(self)

    def wait_event(self, event: Event) -> None:
        """Put what follows after everything that the event, or the other stream until now, has seen."""
        for lane, step in event.seen.items():
            self.seen[lane] = max(step, self.seen.get(lane, 0))

    wait_stream = wait_event

    def record_event(self, event: Event | None = None) -> Event:
        """Record what this stream was given until now."""
        event = event or Event()
        event.record(self)
        return event

    def step(self) -> int:
        """Count one more operation, which the host gives after all it has waited for."""
        self.wait_event(card().host)
        self.seen[self] = self.seen.get(self, 0) + 1
        return self.seen[self]


class _Here(threading.local):
    """State of one thread: its device and its stream (None: the device's own)."""

    index: int = 0
    stream: Lane | None = None


class Card:
    """The devices' state. now, peak: bytes by place ("cuda:0"); calls: how often a function that does nothing ran."""

    host: Lane
    defaults: list[Lane]

    def __init__(self, devices: int, name: str, capacity: int) -> None:
        self.devices, self.name, self.capacity = devices, name, capacity
        self.here, self.lanes = _Here(), weakref.WeakSet[Lane]()
        self.now, self.peak, self.calls = Counter[str](), Counter[str](), Counter[str]()
        # (place, bytes wanted): True refuses the allocation
        self.refuses: Callable[[str, int], bool] = lambda place, size: self.now[place] + size > self.capacity

    def stream(self, device: Any = None) -> Lane:
        """The stream that this thread gives work to."""
        return self.here.stream or self.defaults[torch.device(place(device)).index]

    def own(self, storage: torch.UntypedStorage, where: str) -> None:
        """Count a storage as memory of `where` until it dies. Raises torch.OutOfMemoryError where there is no room."""
        size = storage.nbytes()
        if self.refuses(where, size):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes on {where} (a stand-in)")
        self.now[where] += size
        self.peak[where] = max(self.peak[where], self.now[where])
        weakref.finalize(storage, self.now.subtract, {where: size}).atexit = False

    def does_nothing(self, name: str, answer: Any = None) -> Callable[..., Any]:
        """Make a function that counts its calls and returns `answer`."""

        def call(*_: Any, **__: Any) -> Any:
            self.calls[name] += 1
            return answer

        return call


_card: Card | None = None


def card() -> Card:
    """Look the installed stand-in up."""
    assert _card is not None, "stand_in.install() comes first"
    return _card


def place(device: Any = None) -> str:
    """Name a device as torch.cuda's functions take it: a number, a name, a torch.device, or None for the current."""
    index = device if isinstance(device, int) else torch.device(device or "cuda").index
    return f"cuda:{card().here.index if index is None else index}"


@contextmanager
def _set_for(key: str, value: Any) -> Iterator[None]:
    here = card().here
    before = getattr(here, key)
    setattr(here, key, before if value is None else value)
    try:
        yield
    finally:
        setattr(here, key, before)


def install(devices: int = 1, name: str = "NVIDIA H200", capacity: int = 139 << 30) -> Card:
    """Put the stand-in in torch.cuda's place, for the whole process. capacity: bytes of each device."""
    global _card
    _card = it = Card(devices, name, capacity)
    it.host, it.defaults = Lane(0), [Lane(n) for n in range(devices)]
    about = SimpleNamespace(name=name, total_memory=capacity, major=9, minor=0, multi_processor_count=132, uuid="twin")
    constants = {"is_available": True, "is_initialized": True, "is_bf16_supported": True, "device_count": devices}
    constants |= {"is_current_stream_capturing": False}  # which torch's CUDA build asks the driver
    constants |= {"get_device_name": name, "get_device_capability": (9, 0), "get_device_properties": about}
    nothing = ("_lazy_init", "init", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all")
    now, peak = lambda device=None: it.now[place(device)], lambda device=None: it.peak[place(device)]
    answers = {
        **{key: it.does_nothing(key, value) for key, value in {**dict.fromkeys(nothing), **constants}.items()},
        **{"Stream": Lane, "Event": Event, "current_stream": it.stream, "memory_stats": lambda device=None: {}},
        "stream": lambda stream: _set_for("stream", stream),
        "device": lambda device: _set_for("index", int(place(device)[5:])),
        "set_stream": lambda stream: setattr(it.here, "stream", stream),
        "set_device": lambda device: setattr(it.here, "index", int(place(device)[5:])),
        "current_device": lambda: it.here.index,
        "default_stream": lambda device=None: it.defaults[int(place(device)[5:])],
        "synchronize": lambda device=None: [it.host.wait_event(lane) for lane in [*it.lanes]],
        **{"memory_allocated": now, "memory_reserved": now, "max_memory_allocated": peak, "max_memory_reserved": peak},
        "mem_get_info": lambda device=None: (capacity - now(device), capacity),
        "reset_peak_memory_stats": lambda device=None: it.peak.update({place(device): now(device) - peak(device)}),
        "get_rng_state": lambda device=None: torch.get_rng_state(),  # the random numbers are the CPU's
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * devices,
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    }
    for key, answer in answers.items():
        setattr(torch.cuda, key, answer)
    torch.cuda.profiler.start, torch.cuda.profiler.stop = map(it.does_nothing, ("profiler.start", "profiler.stop"))
    return it
