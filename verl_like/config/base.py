"""What every configuration dataclass shares: enum conversion and range checks that name the key, its value and the fix.

Standard library only: the whole package is importable without torch, hydra or ray.
"""

import difflib
import math
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any


@dataclass(kw_only=True, slots=True)
class ConfigNode:
    """Base of all sections. Converts plain strings to the enums of their fields, then runs the section's `check`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(field.type, type) and issubclass(field.type, Enum):
                setattr(self, field.name, _to_enum(field.type, field.name, getattr(self, field.name)))
        self.check()

    def check(self) -> None:
        """Raise ValueError when a value is out of range or two keys of this section contradict each other."""


def _to_enum(kind: type[Enum], key: str, value: Any) -> Enum:
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(str(member.value) for member in kind)
        raise ValueError(f"{key}={value!r}: choose one of {names}") from None


def require(condition: bool, key: str, value: object, fix: str) -> None:
    """Raise ValueError "key=value: fix" unless the condition holds."""
    if not condition:
        raise ValueError(f"{key}={value!r}: {fix}")


def at_least(node: ConfigNode, minimum: float, *keys: str) -> None:
    """Each of these fields is None or a finite number of at least `minimum`."""
    for key in keys:
        value = getattr(node, key)
        legal = value is None or (math.isfinite(value) and value >= minimum)
        require(legal, key, value, f"must be at least {minimum}")


def above(node: ConfigNode, bound: float, *keys: str) -> None:
    """Each of these fields is None or a finite number above `bound`."""
    for key in keys:
        value = getattr(node, key)
        require(value is None or (math.isfinite(value) and value > bound), key, value, f"must be above {bound}")


def between(node: ConfigNode, low: float, high: float, *keys: str) -> None:
    """Each of these fields is None or lies in [low, high]."""
    for key in keys:
        value = getattr(node, key)
        require(value is None or low <= value <= high, key, value, f"must lie between {low} and {high}")


def one_of(node: ConfigNode, key: str, choices: tuple[str, ...]) -> None:
    """The field holds one of these names."""
    value = getattr(node, key)
    close = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    require(value in choices, key, value, f"{hint}choose one of {', '.join(choices)}")


def minus_one_or_positive(node: ConfigNode, *keys: str) -> None:
    """Each of these fields is None, -1 (meaning "off" or "all") or at least 1."""
    for key in keys:
        value = getattr(node, key)
        require(value is None or value == -1 or value >= 1, key, value, "must be -1 (off) or at least 1")
