"""A named menu of functions, open to functions of users' own, and an error that helps when the name is wrong."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from verl_like.config.menus import Choice
from verl_like.user_code import UserCodeError, check_call, is_reference, load, note_registered

T = TypeVar("T")
R = TypeVar("R", bound=Choice)


_VERLS = frozenset({"token_level_rewards", "old_log_prob"})  # arguments of its advantage estimators, of its losses


class Registry(Generic[T]):
    """Names of one menu -> entries. `config_key` is the key that a user sets to choose from it.

    Those built in have a row in config/menus.txt, and are imported when they are first looked up; others register. A
    reference to code (`file.py:name`) is an entry too: it must take the positional `arguments`.

    Args:
        rows: the menu's.
        of_row: makes an entry of a row and its function. None: the function.
        entry_of: makes an entry of users' own code.
        of_verls: makes an entry of a function that takes verl's arguments. None: it is refused.

    Example:
        ADVANTAGES = Registry("algorithm.adv_estimator", ESTIMATORS, arguments=("inputs", "algorithm"))
        ADVANTAGES.lookup("grpo")

        @ADVANTAGES.register("mine")
        def mine(inputs, algorithm): ...
    """

    def __init__(
        self,
        config_key: str,
        rows: Mapping[str, R] = {},
        *,
        arguments: tuple[str, ...] = (),
        of_row: Callable[[R, Any], T] = lambda row, function: function,
        entry_of: Callable[[Any], T] = lambda found: found,
        of_verls: Callable[[Any], T] | None = None,
    ) -> None:
        self.config_key = config_key
        self._rows = {name: row for name, row in rows.items() if row.code}
        self._arguments, self._of_row, self._entry_of, self._of_verls = arguments, of_row, entry_of, of_verls
        self._entries: dict[str, T] = {}
        self._loaded: dict[str, T] = {}  # by name or reference

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator: make the entry available under each of `names`. A taken name is an error."""

        def add(entry: T) -> T:
            for name in names:
                if name in self.names():
                    raise ValueError(f"{self.config_key}: the name {name!r} is registered twice")
                self._entries[name] = self._adapted(entry, name) if self._in_verls_form(entry) else entry
                note_registered(self.config_key, name)
            return entry

        return add

    def lookup(self, name: str) -> T:
        """Return the entry called `name`, or the code that it refers to.

        Raises ValueError, with the known names, where there is neither.
        """
        if name in self._entries:
            return self._entries[name]
        if name not in self._loaded:
            if name in self._rows:
                self._loaded[name] = self._of_row(self._rows[name], self._rows[name].load())
            elif self._arguments and is_reference(name):
                self._loaded[name] = self._load(name)
            else:
                close = difflib.get_close_matches(name, self.names(), n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"{self.config_key}={str(name)!r} is not known.{hint} Known: {', '.join(self.names())}"
                )
        return self._loaded[name]

    def _load(self, reference: str) -> T:
        found = load(reference, self.config_key)
        if self._in_verls_form(found):
            return self._adapted(found, reference)
        check_call(getattr(found, "function", found), f"{self.config_key}={reference}", *self._arguments)
        return self._entry_of(found)

    def _in_verls_form(self, entry: Any) -> bool:
        """Tell whether a function takes verl's arguments: one with two of them binds, and would fail in a step."""
        function = getattr(entry, "function", entry)
        if not self._arguments or not callable(function):
            return False
        try:
            return not _VERLS.isdisjoint(inspect.signature(function).parameters)
        except ValueError:  # some compiled functions do not tell
            return False

    def _adapted(self, entry: Any, name: str) -> T:
        if self._of_verls is None:
            raise UserCodeError(
                f"{self.config_key}={name} takes the arguments that verl gives; here it is called with "
                f"({', '.join(self._arguments)}): docs/extending.md shows one"
            )
        return self._of_verls(entry)

    def names(self) -> list[str]:
        """Names of all entries, sorted."""
        return sorted({*self._rows, *self._entries})
