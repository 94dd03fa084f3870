"""What many tests of the package's parts begin with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # most tests need no torch
    from verl_like.parallel.dist import ProcessInfo


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessInfo]:
    """This process as a gloo group of one, until the file's tests are through."""
    from tests.unit.engine.tiny import single_process
    from verl_like.parallel.dist import shutdown_distributed

    yield single_process()
    shutdown_distributed()
