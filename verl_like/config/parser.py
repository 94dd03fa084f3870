"""The command lines' parser: it says what a misspelt option or verb was meant to be. Standard library only."""

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from verl_like.config.names import foreign_hint
from verl_like.config.schema import NO_HOME, find_key, without_home
from verl_like.config.spellings import renamed

_PLACES = ("base", "chat_template", "config_name", "config_path", "json", "out", "samples", "source")  # of options


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
        """Parse arguments as argparse does, or as its intermixed form does, which calls this method in turn."""
        if not self.mixed:
            return super().parse_known_args(args, namespace)
        self.mixed = False
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.mixed = True

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert one argument as argparse does.

        The program ends for an empty name of a file, folder or model, and for one in the home of an unknown user.
        """
        name = action.option_strings[0] if action.option_strings else action.metavar or action.dest
        named = (
            not action.option_strings and action.dest not in ("key", "overrides") and action.nargs != argparse.PARSER
        )
        if action.dest in _PLACES or named:
            if not arg_string.strip():
                self.exit(1, f"error: {name} is empty (a shell variable that is not set?): give it a value\n")
            if without_home(arg_string):
                self.exit(1, f"error: {name}={arg_string}: {NO_HOME}\n")
        return super()._get_value(action, arg_string)  # pyright: ignore

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


def number(low: float, high: float = math.inf, kind: type[float] = float) -> Callable[[str], float]:
    """The type of an option: a finite number of this range, its ends included."""

    def number(text: str) -> float:
        value = kind(text)
        if not low <= value <= high or math.isinf(value):
            raise argparse.ArgumentTypeError(f"{text}: give a finite number from {low:g} to {high:g}")
        return value

    return number


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
