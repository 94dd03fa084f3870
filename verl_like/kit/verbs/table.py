"""Aligned columns on a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """One line a row under the header, two spaces between columns. right: columns of numbers."""
    everything = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*everything, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if number in right else text.ljust(width)
            for number, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in everything
    )
