"""`verl-like bisect A B`: the first step, phase and tensor in which two recorded runs part."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl_like.config.parser import number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two runs."""
    for name in ("A", "B"):
        parser.add_argument(name.lower(), metavar=name, help="folder of a run with trainer.record_freq")
    parser.add_argument("--tolerance", type=number(0), default=0.0, help="relative; 0: to the last bit (the default)")


def run(arguments: argparse.Namespace) -> None:
    """Print where they part; exit status 1 where they do."""
    from verl_like.kit.replaying import parting

    a, b = Path(arguments.a).expanduser(), Path(arguments.b).expanduser()
    found = parting(a, b, arguments.tolerance)
    if found is None:
        print("no difference in the steps that both have recorded")
        return
    print(f"step {found.step}, {found.phase}: {found.where}\n  A: {found.first}\n  B: {found.second}")
    sys.exit(1)
