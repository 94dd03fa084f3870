"""The table of types in docs/models.md is what its tests and checks say."""

from __future__ import annotations

from pathlib import Path

from tests.unit.models import matrix


def test_the_page_shows_the_table(tmp_path: Path) -> None:
    expected = matrix.page_with(matrix.table(tmp_path))
    assert matrix.PAGE.read_text(encoding="utf-8") == expected, "python -m tests.unit.models.matrix writes it"
