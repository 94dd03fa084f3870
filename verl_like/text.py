"""Text that every encoder takes: JSON may hold half of a surrogate pair, as a cut emoji leaves it, and UTF-8 may not."""

from __future__ import annotations

import re
from typing import Any

_HALF = re.compile("[\ud800-\udfff]")


def whole(value: Any) -> Any:
    """The value with U+FFFD for each half of a surrogate pair in its texts, keys too. Two halves become one character."""
    if isinstance(value, str):
        if value.isascii() or not _HALF.search(value):
            return value
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {whole(key): whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(whole, value))
    return value
