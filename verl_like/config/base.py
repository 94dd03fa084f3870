"""What every configuration dataclass shares: enum conversion and range checks that name the key, its value and the fix.

Standard library only: the whole package is importable without torch, hydra or ray.
"""

import difflib
import math
import re
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from verl_like.user_code import FORMS, is_reference, registered_names


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
        require(legal, key, value, f"must be {_finite(value)}at least {minimum}")


def above(node: ConfigNode, bound: float, *keys: str) -> None:
    """Each of these fields is None or a finite number above `bound`."""
    for key in keys:
        value = getattr(node, key)
        legal = value is None or (math.isfinite(value) and value > bound)
        require(legal, key, value, f"must be {_finite(value)}above {bound}")


def _finite(value: float | None) -> str:
    """What a message about inf or nan adds."""
    return "" if value is None or math.isfinite(value) else "a finite number, "


def between(node: ConfigNode, low: float, high: float, *keys: str) -> None:
    """Each of these fields is None or lies in [low, high]."""
    for key in keys:
        value = getattr(node, key)
        require(value is None or low <= value <= high, key, value, f"must lie between {low} and {high}")


def check_pattern(key: str, value: str) -> re.Pattern[str]:
    """The regular expression; ValueError for what is none."""
    try:
        return re.compile(value)
    except re.error as error:
        raise ValueError(f"{key}={value!r}: no regular expression ({error})") from error


def one_of(node: ConfigNode, key: str, choices: tuple[str, ...]) -> None:
    """The field holds one of these names."""
    value = getattr(node, key)
    close = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    require(value in choices, key, value, f"{hint}choose one of {', '.join(choices)}")


def on_menu(node: ConfigNode, key: str, choices: tuple[str, ...], menu: str) -> None:
    """The field holds one of these names, one that imported code registered under `menu`, or a reference to code."""
    value = str(getattr(node, key))
    if is_reference(value) or value in registered_names(menu):
        return
    names = (*choices, *sorted(registered_names(menu) - set(choices)))
    close = difflib.get_close_matches(value, names, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    fix = f"{hint}choose one of {', '.join(names)}, or name code of your own: {FORMS} (docs/extending.md)"
    require(value in names, key, value, fix)


def reference_or_none(node: ConfigNode, key: str) -> None:
    """The field is None or names code of the user's own."""
    value = getattr(node, key)
    require(value is None or is_reference(value), key, value, f"name a class of your own: {FORMS}")


def minus_one_or_positive(node: ConfigNode, *keys: str) -> None:
    """Each of these fields is None, -1 (meaning "off" or "all") or at least 1."""
    for key in keys:
        value = getattr(node, key)
        require(value is None or value == -1 or value >= 1, key, value, "must be -1 (off) or at least 1")
