"""`verl-like plan ...`: a command line of `train`, checked and told instead of run."""

from __future__ import annotations

import argparse
import logging

from verl_like.gc_settings import starting
from verl_like.observe.logs import told_in_a_line
from verl_like.trainer.command_line import add_config_arguments, user_files
from verl_like.trainer.compose import compose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The keys of `verl-like train`."""
    add_config_arguments(parser)


@starting()
def run(arguments: argparse.Namespace) -> None:
    """Print what the run would be. Raises ConfigError, hence exit status 1, for what is wrong with it."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", force=True)
    with told_in_a_line("the plan"):
        config = compose(arguments.overrides, user_files(arguments))
    from verl_like.trainer.costs import NO_ROOM
    from verl_like.trainer.dry_run import dry_run  # after the keys: it brings torch

    with told_in_a_line("the plan"):
        rows = dry_run(config)
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        first, *more = text.splitlines()
        print("\n".join([f"{name:<{width}}  {first}", *(f"{'':<{width}}  {line}" for line in more)]))
    short = any(NO_ROOM in text for _, text in rows)
    verdict = "By the memory forecast this runs out of memory, see above." if short else "This can run."
    print(f"\n{verdict} Nothing was started but the graders, and nothing was written.")
