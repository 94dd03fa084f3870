"""Entry point of `verl-like`. Subcommands import what they need when they run, so that help is quick."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from verl_like.cli import bench, check_template, compare, report, selfcheck


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run the subcommand."""
    parser = argparse.ArgumentParser(prog="verl-like", description="Tools around the trainer.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bench.add_commands(commands.add_parser("bench", help="measure the trainer on fixed shapes"))
    selfcheck.add_arguments(
        commands.add_parser(
            "selfcheck", help="show that loss and gradient are right on your model, however a batch is cut"
        )
    )
    check_template.add_arguments(
        commands.add_parser("check-template", help="show what the chat template does to turns of a conversation")
    )
    report.add_arguments(commands.add_parser("report", help="write one HTML file about a run"))
    compare.add_arguments(commands.add_parser("compare", help="write one HTML file about several runs"))
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], None] = arguments.run
    run(arguments)
