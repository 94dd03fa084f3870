"""`verl-like replay RUN STEP`: one recorded step once more, to the same loss and gradient norm."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl_like.config.parser import number
from verl_like.kit.verbs.table import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A run, a step, and keys to be set otherwise."""
    parser.add_argument("folder", metavar="RUN", help="folder of a run with trainer.record_freq (trainer.log_dir)")
    parser.add_argument(
        "step", metavar="STEP", type=int, help="the step; the checkpoint of the one before must be there"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="keys to be set otherwise, as trainer.device=cpu"
    )
    parser.add_argument("--tolerance", type=number(0), default=1e-4, help="relative; 0: to the last bit (1e-4)")


def run(arguments: argparse.Namespace) -> None:
    """Print what is compared; exit status 1 where something differs."""
    from verl_like.kit.replaying import replay

    found = replay(Path(arguments.folder).expanduser(), arguments.step, arguments.overrides, arguments.tolerance)
    rows = [
        (each.phase, each.where, str(each.first), str(each.second), "" if each.same else "DIFFERS") for each in found
    ]
    print(table(("phase", "what", "recorded", "now", ""), rows))
    if not all(each.same for each in found):
        sys.exit(1)
