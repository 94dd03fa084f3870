"""What the contracts that need Ray share: a module has a `session` of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verl_like.cluster.launch import RaySession
from verl_like.cluster.resources import Allocation, allocate


def two_ranks() -> Iterator[Allocation]:
    """A place for a worker group of two ranks."""
    allocation = allocate(1, 2, timeout=30, may_grow=False)
    yield allocation
    allocation.release()


@pytest.fixture(scope="module")
def room(session: RaySession) -> Iterator[Allocation]:
    yield from two_ranks()


@pytest.fixture(scope="module")
def second_room(session: RaySession) -> Iterator[Allocation]:
    yield from two_ranks()
