"""trainer.prove_step: whole steps are proved before a run, and a step that is wrong ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import overrides, write_task

from verl_like.config.errors import RunStopped
from verl_like.kit.report.page import write_report
from verl_like.trainer.compose import compose
from verl_like.trainer.run import fit
from verl_like.workers.roles import ActorRole

KEYS: dict[str, Any] = {
    "trainer.prove_step": True,
    "trainer.total_training_steps": 1,
    "trainer.save_freq": 1,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,  # two updates a step: old log-probs are computed before
}


def test_the_outcome_is_in_log_report_and_checkpoint(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fit(compose(overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **KEYS)))
    table = (folder / "step_proof.txt").read_text()
    assert table.rstrip().endswith(": passed") and "step 2: actor: mini-batch 1: gradient norm" in table
    assert (folder / "global_step_1" / "step_proof.txt").read_text() == table
    assert "step 1: old log-probs" in (folder / "verl_like.log").read_text()
    assert table.splitlines()[-1] in write_report(folder).read_text().replace("&#39;", "'")


def test_a_wrong_step_ends_the_run(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ActorRole.log_probs

    def late(role: Any, batch: Any) -> Any:
        found = own(role, batch)
        return found.replace(old_log_probs_T=found.old_log_probs_T.roll(1))

    monkeypatch.setattr(ActorRole, "log_probs", late)
    with pytest.raises(RunStopped, match="step 1: old log-probs differs from a plain step by"):
        fit(compose(overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **KEYS)))
    assert "FAILED" in (tmp_path / "out" / "step_proof.txt").read_text()
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
