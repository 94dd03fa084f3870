"""A pytest plugin (`-p tests.twin.dry_run`): the tests of tests/gpu with cuda turned into cpu, at tiny sizes.

The first minute on a card is then not spent on typing errors. dry_run_list.py says what is left out, and why.
"""

from __future__ import annotations

import os

import pytest
import torch  # noqa: F401  # first: with TWIN set it brings the twin along

from tests.twin import as_cpu
from tests.twin.dry_run_list import ENGINES, FEWER, LEFT_OUT, SIZES

as_cpu.enter(int(os.environ.get("TWIN", "1")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is left out, drop cases that are the same lines again, and make the sizes tiny."""
    dropped = []
    for item in items:
        file, _, name = item.nodeid.removeprefix("tests/gpu/").partition("::")
        function, _, case = name.partition("[")
        for beginning, reason in LEFT_OUT.items():
            if f"{file}::{name}".startswith(beginning):
                item.add_marker(pytest.mark.skip(reason=f"not without a card: {reason}"))
        kept = FEWER.get((file, function))
        if (kept is not None and f"[{case}" not in kept) or any(engine in case for engine in ENGINES):
            dropped.append(item)
        module = getattr(item, "module", None)
        for key, value in SIZES.get(getattr(module, "__name__", "").rpartition(".")[2], {}).items():
            setattr(module, key, value)
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)
