"""`verl-like compare A B [C]`: one HTML file with runs side by side; with --why, where two part and which keys tell."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl_like.config.errors import ConfigError, input_errors
from verl_like.config.parser import number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The runs' folders, and where the file goes."""
    parser.add_argument("run_folders", metavar="RUN", nargs="+", help="two or three runs' folders")
    parser.add_argument(
        "--why",
        action="store_true",
        help="tell the first quantity that differs and the keys that can explain it; needs trainer.record_freq. The "
        "second may be a table of another trainer's responses (docs/selfcheck.md)",
    )
    parser.add_argument("--tolerance", type=number(0), default=0.0, help="with --why: relative; 0: to the last bit")
    parser.add_argument("--out", metavar="FILE", default="compare.html", help="where to write it; default: %(default)s")


def run(arguments: argparse.Namespace) -> None:
    """Write the file and print its path, or say why; exit status 1 where two runs differ.

    Raises ConfigError, hence exit status 1, where there are not two or three runs.
    """
    from verl_like.kit.report.page import write_comparison

    if arguments.why:
        from verl_like.kit.why import explain

        if len(arguments.run_folders) != 2:
            raise ConfigError([f"--why with {len(arguments.run_folders)} runs: name two"])
        first, second = (Path(each).expanduser() for each in arguments.run_folders)
        with input_errors():
            found = explain(first, second, arguments.tolerance)
        if found is None:
            print("no difference in the steps that both have recorded")
            return
        print(found.text())
        sys.exit(1)
    if not 2 <= len(arguments.run_folders) <= 3:
        raise ConfigError([f"{len(arguments.run_folders)} runs were named; two or three can be compared"])
    with input_errors():
        print(write_comparison(arguments.run_folders, arguments.out))
