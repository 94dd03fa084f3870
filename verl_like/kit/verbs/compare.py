"""`verl-like compare A B [C]`: one HTML file with runs side by side."""

from __future__ import annotations

import argparse

from verl_like.config.errors import ConfigError, input_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The runs' folders, and where the file goes."""
    parser.add_argument("run_folders", metavar="RUN", nargs="+", help="two or three runs' folders")
    parser.add_argument("--out", metavar="FILE", default="compare.html", help="where to write it; default: %(default)s")


def run(arguments: argparse.Namespace) -> None:
    """Write the file and print its path.

    Raises ConfigError, hence exit status 1, where there are not two or three runs.
    """
    from verl_like.kit.report.page import write_comparison

    if not 2 <= len(arguments.run_folders) <= 3:
        raise ConfigError([f"{len(arguments.run_folders)} runs were named; two or three can be compared"])
    with input_errors():
        print(write_comparison(arguments.run_folders, arguments.out))
