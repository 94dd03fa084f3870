"""`verl-like train ...`: main_ppo under the one command."""

from __future__ import annotations

import argparse

from verl_like.trainer import main_ppo
from verl_like.trainer.command_line import add_run_arguments, run_parsed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of main_ppo."""
    add_run_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Train."""
    main_ppo.quiet_tokenizers()
    run_parsed(main_ppo.train, arguments)
