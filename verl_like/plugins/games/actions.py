"""Helpers that games share: reading a move from what the model wrote, and levels that training never sees."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

ANSWER = r"<answer>(.*?)</answer>"
WHOLE = r"^(.*)$"


def said(text: str, pattern: str) -> str:
    """The last group of the last match, without white space around it; "" without a match (ROLL's action_pattern)."""
    found = list(re.finditer(pattern, text, re.DOTALL))
    return found[-1].group(found[-1].re.groups).strip() if found else ""


def move(text: str, pattern: str, names: Sequence[str]) -> int | None:
    """The number of the move that the text names, whatever its case; None where it names none."""
    word = said(text, pattern).lower()
    return next((number for number, name in enumerate(names) if name.lower() == word), None)


def belongs(level: str, holdout: float, split: str) -> bool:
    """True where a split may play this level.

    holdout: share of all levels that are for validation alone; 0: no level is held out, and validation plays any.
    split: "train" or "val".
    """
    if holdout <= 0:
        return True
    place = int.from_bytes(hashlib.blake2b(level.encode(), digest_size=8).digest(), "big") / 2**64
    return (place < holdout) == (split == "val")


def split_of(options: dict[str, Any] | None) -> str:
    """Return the split that `reset` was told: train or val."""
    return str((options or {}).get("split", "train"))


def share(value: float, name: str) -> float:
    """A probability or share. Raises ValueError for anything else."""
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value}: must be at least 0 and below 1")
    return float(value)
