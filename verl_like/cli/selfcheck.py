"""`verl-like selfcheck ...`: a command line of main_ppo, checked instead of run."""

from __future__ import annotations

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `verl-like selfcheck`."""
    parser.add_argument("--rows", type=int, default=10, help="random rows of the mini-batch")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the data-parallel check; 1: leave it out")
    parser.add_argument("overrides", nargs="*", help="keys of main_ppo, as for the run itself")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the table; exit status 1 when something depends on how the batch was cut."""
    from verl_like.trainer.compose import compose
    from verl_like.trainer.gradient_check import SelfCheck, table

    findings = SelfCheck(config=compose(arguments.overrides), num_rows=arguments.rows).run(ranks=arguments.ranks)
    print(table(findings))
    if not all(finding.passed for finding in findings):
        sys.exit(1)
