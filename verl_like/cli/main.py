"""Entry point of `verl-like`: a table of verbs. Only the verb that was asked for is imported, so that help is quick."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_like import __version__
from verl_like.ending import orderly_end
from verl_like.text import table_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """Subcommand of verl-like.

    module: place of its `add_arguments(parser)`, and of its `run(arguments)` unless the former sets another one.
    apart: no options may stand between its positional arguments.
    passes_on: words behind -- are no arguments of its own, and arrive as `passed`.
    leaves: it has closed all that it opened, so that its process need not look through what it imported, for most of a
        second, before it ends.
    """

    name: str
    module: str
    help: str
    examples: tuple[str, ...]
    apart: bool = False
    passes_on: bool = False
    leaves: bool = False


def _verb(name: str, module: str, traits: str, text: str, *examples: str) -> Verb:
    """Read a row of verbs.txt."""
    given = dict.fromkeys(traits.split(), True)
    return Verb(name=name, module=f"verl_like.{module}", help=text, examples=examples, **given)


VERBS = tuple(_verb(*row) for row in table_rows(Path(__file__).with_name("verbs.txt").read_text(encoding="utf-8")))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run the verb. What is wrong with a configuration ends with status 1 and its text."""
    with orderly_end():  # from here on, and the rest is imported below
        from verl_like.config.errors import ConfigError, RunStopped
        from verl_like.config.parser import Parser, meant

        words = sys.argv[1:] if argv is None else list(argv)
        top = _parser()
        if not words or words[0].startswith("-"):
            top.parse_args(words)
            top.error("name a COMMAND; verl-like --help lists them")
        name, *rest = words
        verb = next((verb for verb in VERBS if verb.name == name), None)
        if verb is None:
            near = meant(name, [verb.name for verb in VERBS]) or "; verl-like --help lists them"
            top.error(f"there is no command {name!r}{near}")
        parser = Parser(
            prog=f"verl-like {name}",
            description=f"{verb.help[0].upper()}{verb.help[1:]}.",
            examples=verb.examples,
            mixed=not verb.apart,
        )
        module = importlib.import_module(verb.module)
        parser.set_defaults(run=getattr(module, "run", None))
        module.add_arguments(parser)
        end = rest.index("--") if verb.passes_on and "--" in rest else len(rest)
        arguments = parser.parse_args(rest[:end])
        arguments.passed = rest[end + 1 :]
        run: Callable[[argparse.Namespace], None] = arguments.run
        try:
            run(arguments)
        except (ConfigError, RunStopped) as error:
            sys.exit(f"error: {error}")
        except Exception as error:
            if name in ("train", "sft", "preference") or isinstance(error, BrokenPipeError):  # they tell of it
                raise
            from verl_like.observe.logs import told_in_a_line

            with told_in_a_line(f"verl-like {name}"):
                raise
    if argv is None and verb.leaves:
        os._exit(0)


def _parser() -> argparse.ArgumentParser:
    from verl_like.config.parser import Parser

    width = max(len(verb.name) for verb in VERBS)
    lines = [f"  {verb.name:<{width}}  {verb.help}" for verb in VERBS]
    parser = Parser(
        prog="verl-like",
        usage="verl-like COMMAND ...",
        description="Train language models with PPO and GRPO, and look at what came of it.",
        epilog="\n".join(["commands:", *lines, "", "verl-like COMMAND --help shows options and examples."]),
    )
    parser.add_argument("--version", action="version", version=f"verl_like {__version__}")
    return parser
