"""Legal configurations, drawn at random around what landed last, pass the proof of steps: no false alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.selfcheck.random_steps import LATE, drawn, ranks_of
from verl_like.kit.selfcheck.report import table
from verl_like.kit.selfcheck.step_proof import prove_step
from verl_like.kit.selfcheck.tiny import write_tiny_model

pytestmark = pytest.mark.slow


# The last two on four ranks, the first of them with a pool for critic and reference.
@pytest.mark.parametrize(("number", "ranks"), [*((i, ranks_of(i)) for i in range(len(LATE))), (700, 4), (705, 4)])
def test_no_false_alarm(tmp_path: Path, number: int, ranks: int) -> None:
    tiny = Path(write_tiny_model(tmp_path / "tiny"))
    config, keys = drawn(number, tiny, tmp_path, ranks)
    findings, notes = prove_step(config, ranks=ranks)
    assert all(each.passed for each in findings), f"{keys}\n{notes}\n{table(findings)}"
    assert len(findings) >= 15 and not any("updates" in note for note in notes)  # both steps, with their updates
