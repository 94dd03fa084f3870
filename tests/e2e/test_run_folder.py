"""What a real run leaves behind by default: samples with their tokens, the environment, the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import overrides, write_task

import verl_like
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train


@pytest.mark.parametrize("old_log_probs", ["auto", "recompute"])
def test_the_folder_of_a_run(tmp_path: Path, tiny_model: Path, old_log_probs: str) -> None:
    settings = {
        "trainer.total_training_steps": 7,
        "trainer.test_freq": 6,
        "trainer.report_freq": 20 if old_log_probs == "auto" else -1,
        "trainer.sample_freq": 3,
        "actor_rollout_ref.actor.old_log_probs": old_log_probs,
    }
    train(compose(overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **settings)))
    run = verl_like.read_run(tmp_path / "out")
    assert sorted({sample["step"] for sample in run.samples}) == [1, 2, 3, 4, 5, 6]  # the first five, and every third
    assert sorted({sample["step"] for sample in run.validation_samples}) == [6, 7]
    for sample in run.samples:
        tokens, length = sample["tokens"], sample["response_tokens"]
        assert {len(tokens[name]) for name in ("text", "rollout_log_probs", "log_probs", "advantages")} == {length}
        gaps = [abs(a - b) for a, b in zip(tokens["log_probs"], tokens["rollout_log_probs"], strict=True)]
        assert max(gaps) < 2e-3  # the same weights, before the update
        assert sample["weight_version"] <= sample["step"] and sample["chosen"] in ("chance", "telling")
    groups = {(sample["step"], sample["group"]) for sample in run.samples}
    assert len(groups) == 12 and len(run.samples) == 12 * 8
    advantages = [sum(s["advantage"] for s in run.samples if (s["step"], s["group"]) == group) for group in groups]
    assert max(map(abs, advantages)) < 1e-3  # a whole group's advantages cancel
    assert run.steps[7]["training/weight_staleness"] == 0.0 and run.environment["processes"] == 1
    shown = (tmp_path / "out" / "verl_like.log").read_text().split("some of the answers")
    assert len(shown) == 4 and [part.count("    prompt: ") for part in shown[1:]] == [3, 3, 3]  # step 1, validations
    report = tmp_path / "out" / "report.html"
    assert report.exists() == (old_log_probs == "auto")
    if report.exists():
        text = report.read_text(encoding="utf-8")
        written = json.loads(text.split('id="samples">')[1].split("</script>")[0])
        assert len(written) == len(run.samples) + len(run.validation_samples)
