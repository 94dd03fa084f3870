"""Runs with teachers: the policy comes nearer to them by every loss, each row to its own, and refusals at the start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.support import metrics_of, overrides, write_task
from verl_like.batch import Evaluated, Rollouts
from verl_like.trainer.compose import compose
from verl_like.trainer.main_ppo import train
from verl_like.trainer.recording import read_step, step_file

LOSS = "distillation.distillation_loss"
MODES: dict[str, dict[str, Any]] = {
    "k1": {"loss_mode": "k1", "use_policy_gradient": True},
    "topk": {"loss_mode": "forward_kl_topk", "topk": 4, "add_tail": True, "kd_temperature": 2.0},
    "jsd": {"loss_mode": "jsd", "kd_temperature": 0.8},
}


@pytest.fixture(scope="module")
def teacher(make_tiny_model: Callable[..., Path]) -> Path:
    """Another model of the same tokens, wider than the policy and surer of itself."""
    folder = make_tiny_model(hidden_size=96, seed=5)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight *= 8
    model.save_pretrained(folder)
    return folder


def run(tmp_path: Path, model: Path, task: dict[str, str] | None = None, **settings: Any) -> list[dict[str, Any]]:
    tmp_path.mkdir(exist_ok=True)
    values = {
        "distillation.enabled": True,
        f"{LOSS}.use_task_rewards": False,
        "actor_rollout_ref.rollout.n": 2,
        "data.train_batch_size": 16,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "trainer.total_training_steps": 8,
    }
    train(compose(overrides(task or write_task(tmp_path), model, tmp_path / "out", **values | settings)))
    return metrics_of(tmp_path / "out")


@pytest.mark.parametrize("mode", MODES)
def test_every_loss_brings_the_policy_to_its_teacher(
    tmp_path: Path, tiny_model: Path, teacher: Path, mode: str
) -> None:
    settings = {f"{LOSS}.{name}": value for name, value in MODES[mode].items()}
    records = run(tmp_path, tiny_model, **{"distillation.teacher_model.model_path": str(teacher)}, **settings)
    assert records[-1]["distillation/abs_loss"] < 0.9 * records[0]["distillation/abs_loss"]
    own = mode != "jsd"  # else the teacher works in the update
    assert records[0]["timing_s/teacher"] > 0 and ("perf/memory_forecast/teacher" in records[0]) is own
    if mode == "topk":
        assert 0 < records[0]["distillation/teacher_mass_min"] <= records[0]["distillation/teacher_mass"] < 1
        assert records[0]["distillation/tail_kl"] != 0


def test_each_row_has_its_own_teacher_and_a_resume_changes_nothing(
    tmp_path: Path, tiny_model: Path, teacher: Path
) -> None:
    """The second teacher is the policy as it was: its rows are at distance 0 in the first step."""
    models = f"{{strong: {{key: even, model_path: {teacher}}}, self: {{key: odd, model_path: {tiny_model}}}}}"
    settings = {
        f"{LOSS}.loss_mode": "forward_kl_topk",
        "distillation.teacher_models": models,
        "distillation.teacher_key": "parity",
        "trainer.save_freq": 2,
        "trainer.record_freq": 1,
    }
    task = write_task(tmp_path)
    rows = pq.read_table(task["data.train_files"]).to_pylist()
    for row in rows:
        row["extra_info"]["parity"] = "odd" if row["extra_info"]["index"] % 2 else "even"
    pq.write_table(pa.Table.from_pylist(rows), task["data.train_files"])
    whole = run(tmp_path / "whole", tiny_model, task=task, **settings, **{"trainer.total_training_steps": 4})
    step = read_step(step_file(tmp_path / "whole" / "out" / "recorded", 1))
    rollouts, known = step.stage("rollouts", Rollouts), step.stage("evaluated", Evaluated)
    odd = [row.extra_info["parity"] == "odd" for row in rollouts.rows]
    assert known.teacher_B.tolist() == [int(is_odd) for is_odd in odd] and 0 < sum(odd) < len(odd)
    mass_BR = known.teacher_log_probs_BR.exp().sum(-1)
    surer = [float(mass_BR[i, 0]) for i in range(len(odd))]
    assert min(s for s, is_odd in zip(surer, odd, strict=True) if not is_odd) > 0
    run(tmp_path / "parts", tiny_model, task=task, **settings, **{"trainer.total_training_steps": 2})
    again = run(tmp_path / "parts", tiny_model, task=task, **settings, **{"trainer.total_training_steps": 4})
    names = [name for name in whole[-1] if name.startswith(("distillation/", "actor/"))]
    assert len(again) == 4 and {n: whole[-1][n] for n in names} == {n: again[-1][n] for n in names}


def test_a_teacher_with_other_tokens_and_rows_without_one_are_refused(
    tmp_path: Path, tiny_model: Path, teacher: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(
        text.replace('"7":', '"swap":').replace('"8":', '"7":').replace('"swap":', '"8":')
    )
    with pytest.raises(SystemExit, match=r"teacher_model.model_path=.*2 of \d+ tokens have another id.*'7' is"):
        run(tmp_path, tiny_model, **{"distillation.teacher_model.model_path": str(other)})
    models = f"{{a: {{model_path: {teacher}}}, b: {{model_path: {tiny_model}}}}}"
    with pytest.raises(SystemExit, match="no teacher has the rows of 'sevens'; there are those of a, b"):
        run(tmp_path, tiny_model, **{"distillation.teacher_models": models})
