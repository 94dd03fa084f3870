"""The list of planted faults fits the source: each stands in its file exactly once, its tests exist."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_fault_can_be_planted(mutation: Mutation) -> None:
    text = (ROOT / "verl_like" / mutation.file).read_text()
    assert text.count(mutation.old) == 1 and mutation.new != mutation.old
    assert all((ROOT / "tests" / "unit" / name).is_file() for name in mutation.tests.split())


def test_there_are_thirty_or_more() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 30
