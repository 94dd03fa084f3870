"""Proof of whole steps at the start of a run (trainer.prove_step): told in the log, kept in a file, the run's end where
it fails."""

from __future__ import annotations

import logging
from pathlib import Path

from verl_like.config import PPOConfig
from verl_like.config.errors import RunStopped
from verl_like.kit.selfcheck.report import table
from verl_like.kit.selfcheck.step_proof import prove_step

logger = logging.getLogger(__name__)


def prove_at_start(config: PPOConfig, ranks: int, file: Path) -> None:
    """Make the proof on `ranks` processes and write its table.

    Raises RunStopped, naming the first line that differs.
    """
    findings, notes = prove_step(config, ranks=ranks)
    text = "\n".join([*notes, table(findings)])
    file.write_text(text + "\n", encoding="utf-8")
    logger.info("%s\n%s", file, text)
    wrong = [each for each in findings if not each.passed]
    if wrong:
        raise RunStopped(
            f"trainer.prove_step=True: {wrong[0].name} differs from a plain step by {wrong[0].difference:.1e} (limit "
            f"{wrong[0].limit:.0e}), the first of {len(wrong)} such lines: see {file} and docs/selfcheck.md"
        )
