"""`verl-like diff RUN_A RUN_B`: the keys in which two runs differ."""

from __future__ import annotations

import argparse
import sys

from verl_like.kit.explaining import shown
from verl_like.kit.run_diff import MISSING, Difference, differences, read_configuration
from verl_like.kit.verbs.table import table

_BY_NATURE = ("trainer.default_local_dir", "trainer.log_dir", "trainer.experiment_name", "trainer.project_name")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two runs."""
    what = "folder of a run, a checkpoint (global_step_<n>) or a YAML file"
    parser.add_argument("run_a", metavar="RUN_A", help=what)
    parser.add_argument("run_b", metavar="RUN_B", help="the same")
    parser.add_argument("--all", action="store_true", help="also the keys that name folders and the run itself")
    parser.add_argument("--exit-code", action="store_true", help="status 1 where they differ, for scripts")


def run(arguments: argparse.Namespace) -> None:
    """Print a line a key. Raises ConfigError for what is no run."""
    (file_a, first), (file_b, second) = map(read_configuration, (arguments.run_a, arguments.run_b))
    found = differences(first, second)
    named = [each for each in found if arguments.all or each.key not in _BY_NATURE]
    print(f"A  {file_a}\nB  {file_b}\n")
    if named:
        print(table(("key", "A", "B", "default"), [_row(each) for each in named]))
    else:
        print("no key differs")
    if len(found) > len(named):
        print(f"\nand {len(found) - len(named)} that name folders and the run (--all shows them)")
    if arguments.exit_code and named:
        sys.exit(1)


def _row(each: Difference) -> tuple[str, ...]:
    a, b = (MISSING if value is MISSING else shown(value) for value in (each.first, each.second))
    return each.key, a, b, shown(each.default)
