"""Base of every configuration dataclass: keys that say what they may be, and messages with key, value and fix.

Standard library only: the whole package is importable without torch, hydra or ray.
"""

import copy
import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from typing import Any, TypeVar, get_args

from verl_like.user_code import FORMS, is_reference, registered_names

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Range:
    """Values that a key may have: a test, what to say of a value that fails it, and words for the documentation."""

    holds: Callable[[Any], bool]
    fix: Callable[[Any], str]
    words: str

    def check(self, key: str, value: Any) -> None:
        """Raise ValueError "key=value: fix" for a value out of range, or of a type that cannot be in it."""
        try:
            holds = self.holds(value)
        except TypeError:
            raise ValueError(f"{key}={value!r}: must be {self.words or 'a value of another type'}") from None
        if not holds:  # the fix looks for the nearest name: most of the time of a configuration, were it always asked
            require(False, key, value, self.fix(value))


def key(default: T, *ranges: Range, unit: str = "", idle: str | tuple[str, ...] = ()) -> T:
    """Declare a key of a section; the string behind the declaration says what the key means.

    ranges: the values it may have. unit: what it counts.
    idle: when it can have no effect, as "KEY is STATE: why" (rule.py has the states), KEY beside it or a whole one.
    Of several such texts the first that holds is said.
    """
    told = {"ranges": ranges, "unit": unit, "idle": idle}
    if isinstance(default, list | dict):
        return field(default_factory=partial(copy.deepcopy, default), metadata=told)
    return field(default=default, metadata=told)


def section(kind: Callable[[], T], idle: str | tuple[str, ...] = ()) -> T:
    """Declare a section below another. idle: when nothing in it can have an effect, as of `key`."""
    return field(default_factory=kind, metadata={"idle": idle})


@dataclass(kw_only=True, slots=True)
class ConfigNode:
    """Base of all sections. Converts strings to the enums of their fields and checks ranges, key by key in order of
    declaration; null is in range where the key's type has it. Then runs the section's `check`."""

    def __post_init__(self) -> None:
        for key in fields(self):
            value = getattr(self, key.name)
            if isinstance(key.type, type) and issubclass(key.type, Enum):
                setattr(self, key.name, _to_enum(key.type, key.name, value))
            if value is not None or type(None) not in get_args(key.type):
                for each in key.metadata.get("ranges", ()):
                    each.check(key.name, value)
        self.check()

    def check(self) -> None:
        """Raise ValueError where two keys of this section contradict each other."""


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


def such_that(holds: Callable[[Any], object], fix: str, words: str = "") -> Range:
    """Values of which something holds. fix: what to do about others. words: what the documentation says, if it does."""
    return Range(lambda value: bool(holds(value)), lambda value: fix, words)


def at_least(minimum: float) -> Range:
    """Finite numbers of at least `minimum`."""
    return _finite(lambda value: value >= minimum, f"at least {minimum}")


def at_most(maximum: float) -> Range:
    """Finite numbers of at most `maximum`."""
    return _finite(lambda value: value <= maximum, f"at most {maximum}")


def above(bound: float) -> Range:
    """Finite numbers above `bound`."""
    return _finite(lambda value: value > bound, f"above {bound}")


def _finite(holds: Callable[[float], bool], words: str) -> Range:
    def fix(value: float) -> str:
        return f"must be {'' if math.isfinite(value) else 'a finite number, '}{words}"

    return Range(lambda value: math.isfinite(value) and holds(value), fix, words)


def between(low: float, high: float) -> Range:
    """Numbers in [low, high]."""
    return Range(
        lambda value: low <= value <= high, lambda value: f"must lie between {low} and {high}", f"{low} to {high}"
    )


def minus_one_or_positive() -> Range:
    """-1 (meaning "off" or "all") or at least 1."""
    return Range(
        lambda value: value == -1 or value >= 1, lambda value: "must be -1 (off) or at least 1", "-1 or at least 1"
    )


def rising_pair() -> Range:
    """Lists of two numbers, the lower one first."""
    fix = "give two numbers, the lower one first"
    return such_that(lambda pair: len(pair) == 2 and pair[0] < pair[1], fix, "two numbers, rising")


def one_of(*choices: str) -> Range:
    """These names."""
    return Range(lambda value: value in choices, lambda value: _choose(str(value), choices), ", ".join(choices))


def subset_of(*choices: str) -> Range:
    """Lists of these names, or dictionaries with these keys."""
    names = ", ".join(choices)
    return Range(
        lambda value: {*value} <= {*choices},
        lambda value: f"unknown {sorted({*value} - {*choices})}; choose from {names}",
        names,
    )


def on_menu(menu: str, *choices: str) -> Range:
    """These names, those that imported code registered under `menu`, and references to code."""

    def fix(value: Any) -> str:
        if str(value).rstrip(":").endswith(".py") or str(value).startswith("pkg://"):
            return f"it names a file or a module alone; add what it holds behind a colon: {FORMS}"
        names = (*choices, *sorted(registered_names(menu) - set(choices)))
        return f"{_choose(str(value), names)}, or name code of your own: {FORMS} (docs/extending.md)"

    def holds(value: Any) -> bool:
        return value in choices or is_reference(str(value)) or value in registered_names(menu)

    return Range(holds, fix, f"{', '.join(choices)}, or code of your own")


# What those mean who write these names of whole algorithms, where it is on the menu
_MEANT = {"ppo": ("gae", "vanilla"), "dapo": ("grpo", "vanilla")}


def _choose(value: str, names: tuple[str, ...]) -> str:
    typed, lower = value.rpartition(".")[2].lower().replace("++", "_plus_plus"), {name.lower(): name for name in names}
    close = [name for name in _MEANT.get(typed, ()) if name in names]
    close += [lower[near] for near in difflib.get_close_matches(typed, lower, n=1)]
    return f"{f'Did you mean {close[0]!r}? ' if close else ''}choose one of {', '.join(names)}"


def reference() -> Range:
    """Names of code of the user's own."""
    return Range(is_reference, lambda value: f"name a class of your own: {FORMS}", "a class of your own")


def check_pattern(key: str, value: str) -> re.Pattern[str]:
    """The regular expression; ValueError for what is none."""
    try:
        return re.compile(value)
    except re.error as error:
        raise ValueError(f"{key}={value!r}: no regular expression ({error})") from error
