"""A named menu of functions, and an error that helps when the name is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Names of one menu -> entries. `config_key` is the key that a user sets to choose from it.

    Example:
        ADVANTAGES: Registry[AdvantageFunction] = Registry("algorithm.adv_estimator")

        @ADVANTAGES.register("grpo")
        def grpo(inputs, algorithm): ...

        ADVANTAGES.lookup("grpo")
    """

    def __init__(self, config_key: str) -> None:
        self.config_key = config_key
        self._entries: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator: make the entry available under each of `names`. A taken name is an error."""

        def add(entry: T) -> T:
            for name in names:
                if name in self._entries:
                    raise ValueError(f"{self.config_key}: the name {name!r} is registered twice")
                self._entries[name] = entry
            return entry

        return add

    def lookup(self, name: str) -> T:
        """The entry called `name`; ValueError with the known names otherwise."""
        if name not in self._entries:
            close = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{self.config_key}={str(name)!r} is not known.{hint} Known: {', '.join(self.names())}")
        return self._entries[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)
