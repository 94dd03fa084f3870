"""A named menu of functions, open to functions of users' own, and an error that helps when the name is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from verl_like.user_code import check_call, is_reference, load, note_registered

T = TypeVar("T")


class Registry(Generic[T]):
    """Names of one menu -> entries. `config_key` is the key that a user sets to choose from it.

    A reference to code (`file.py:name`) is an entry too. It must take the positional `arguments`; `entry_of` makes it
    an entry where the menu holds more than plain functions.

    Example:
        ADVANTAGES: Registry[AdvantageFunction] = Registry("algorithm.adv_estimator", arguments=("inputs", "algorithm"))

        @ADVANTAGES.register("grpo")
        def grpo(inputs, algorithm): ...

        ADVANTAGES.lookup("grpo")
    """

    def __init__(
        self, config_key: str, *, arguments: tuple[str, ...] = (), entry_of: Callable[[Any], T] = lambda found: found
    ) -> None:
        self.config_key = config_key
        self._arguments, self._entry_of = arguments, entry_of
        self._entries: dict[str, T] = {}
        self._loaded: dict[str, T] = {}  # by reference: code of users' own

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator: make the entry available under each of `names`. A taken name is an error."""

        def add(entry: T) -> T:
            for name in names:
                if name in self._entries:
                    raise ValueError(f"{self.config_key}: the name {name!r} is registered twice")
                self._entries[name] = entry
                note_registered(self.config_key, name)
            return entry

        return add

    def lookup(self, name: str) -> T:
        """Return the entry called `name`, or the code that it refers to.

        Raises ValueError, with the known names, where there is neither.
        """
        if name in self._entries:
            return self._entries[name]
        if self._arguments and is_reference(name):
            if name not in self._loaded:
                self._loaded[name] = self._load(name)
            return self._loaded[name]
        close = difflib.get_close_matches(name, self._entries, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{self.config_key}={str(name)!r} is not known.{hint} Known: {', '.join(self.names())}")

    def _load(self, reference: str) -> T:
        found = load(reference, self.config_key)
        check_call(getattr(found, "function", found), f"{self.config_key}={reference}", *self._arguments)
        return self._entry_of(found)

    def names(self) -> list[str]:
        """Names of all entries, sorted."""
        return sorted(self._entries)
