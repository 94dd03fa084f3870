"""The command lines' parser: it says what a misspelt option or verb was meant to be. Standard library only."""

import argparse
import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from verl_like.config.aliases import renamed
from verl_like.config.foreign_names import foreign_hint
from verl_like.config.schema import find_key


class Parser(argparse.ArgumentParser):
    """argparse with suggestions, examples that keep their lines, and no abbreviated options.

    mixed: options may stand between positional arguments, in a subcommand too.
    """

    def __init__(self, *arguments: Any, examples: Sequence[str] = (), mixed: bool = False, **options: Any) -> None:
        self.mixed = mixed
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        if examples:
            options["epilog"] = "\n  ".join(["examples:", *examples])
        super().__init__(*arguments, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse, or its intermixed form, which calls this one in turn."""
        if not self.mixed:
            return super().parse_known_args(args, namespace)
        self.mixed = False
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.mixed = True

    def error(self, message: str) -> NoReturn:
        """End with status 2, the usage and the message; unknown options and names come with the nearest known one."""
        kind, _, rest = message.partition(": ")
        if kind == "unrecognized arguments":
            flags = [word.partition("=")[0] for word in rest.split() if word.startswith("-")]
            message = "; ".join(map(self._unknown, flags)) or message
        elif choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            message += meant(choice[1], re.findall(r"[\w.-]+", choice[2]))
        if kind == "the following arguments are required":  # when intermixed, also those that may be left out
            message = message.replace(", key=value", "")
        super().error(message)

    def _unknown(self, flag: str) -> str:
        if find_key(renamed(flag.lstrip("-"))) is not None:
            return f"{flag}: keys have no dashes before them; write {flag.lstrip('-')}=VALUE"
        return foreign_hint(flag) or f"unknown option {flag}{meant(flag, list(_options(self)))}"


def meant(typed: str, known: Sequence[str]) -> str:
    """`; did you mean NAME?`, or nothing where no name is near."""
    near = difflib.get_close_matches(typed, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _options(below)
        else:
            yield from (name for name in action.option_strings if name.startswith("--"))
