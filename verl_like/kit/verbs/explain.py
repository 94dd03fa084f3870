"""`verl-like explain KEY ...`: what a key means, and what it does in a configuration."""

from __future__ import annotations

import argparse
import shutil
import textwrap

from verl_like.kit.explaining import explain
from verl_like.trainer.command_line import add_config_arguments, user_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The key, and the configuration in which it is looked at."""
    parser.add_argument(
        "key",
        metavar="KEY",
        help="a key, a section, an old or foreign spelling of a key, a preset, an estimator, a loss",
    )
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print what is known. Raises ConfigError, hence exit status 1, for a key that there is not."""
    rows = explain(arguments.key, arguments.overrides, user_files(arguments))
    width = min(max(len(name) for name, _ in rows), 48)
    columns = max(60, shutil.get_terminal_size((120, 24)).columns)
    for name, text in rows:
        print(
            textwrap.fill(
                text,
                columns,
                initial_indent=f"{name:<{width}}  ",
                subsequent_indent=" " * (width + 2),
                break_on_hyphens=False,
                break_long_words=False,
            )
        )
