"""Entry point: `python -m verl_like.plugins.preference data.train_files=... model.path=...`, also under torchrun."""

from __future__ import annotations

import argparse

from verl_like.trainer import sft_trainer

OBJECTIVE = "trainer.objective=preference"

add_arguments = sft_trainer.add_arguments


def run(arguments: argparse.Namespace) -> None:
    """Train on preferences, from parsed arguments."""
    sft_trainer.run(arguments, OBJECTIVE)


if __name__ == "__main__":
    sft_trainer.main(OBJECTIVE, "verl_like.plugins.preference")
