"""Text that every encoder takes, though JSON may hold half of a surrogate pair, as a cut emoji leaves it; errors as
text; tables in text files."""

from __future__ import annotations

import re
from typing import Any


def whole(value: Any) -> Any:
    """The value with U+FFFD for each half of a surrogate pair in its texts and keys. Two halves become a character."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {whole(key): whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(whole, value))
    return value


def one_line(error: BaseException) -> str:
    """An error of a library for a message of ours, one line of which is one problem: its kind and its first words."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    whole_sentences = words[:300].rpartition(". ")[0]
    return whole_sentences if len(words) > 300 and len(whole_sentences) > 150 else words[:300]


def table_rows(text: str) -> list[list[str]]:
    """Cells of the rows of a table, with bars between them. A row goes on in indented lines; # begins a comment."""
    rows = re.sub(r"\n +", " ", re.sub(r"(?m)^#.*\n", "", text))
    return [[cell.strip() for cell in row.split("|")] for row in rows.splitlines() if row]
