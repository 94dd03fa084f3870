"""Numbers of this process that can be read at any moment, not once a step: what a router or a pool of workers has in
hand. Who has some shows itself; plugins/trackers/prometheus.py reads them all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Protocol
from weakref import WeakSet


class Gauges(Protocol):
    """Source of numbers. It is read from any thread; numbers of the same name are added up."""

    def gauges(self) -> Mapping[str, float]:
        """Report the numbers by name, such as pool/reward/workers."""
        ...


_LOCK = threading.Lock()
_SHOWN: WeakSet[Gauges] = WeakSet()


def show(source: Gauges) -> None:
    """Read `source` from now on, as long as it lives."""
    with _LOCK:
        _SHOWN.add(source)


def hide(source: Gauges) -> None:
    """Stop reading `source`. Safe to call twice."""
    with _LOCK:
        _SHOWN.discard(source)


def readings() -> dict[str, float]:
    """Read all numbers as they are now."""
    with _LOCK:
        sources = list(_SHOWN)
    found = Counter[str]()
    for source in sources:
        found.update(source.gauges())
    return {name: float(value) for name, value in found.items()}
