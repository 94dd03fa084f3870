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
from verl_like.cluster.environment import free_port
from verl_like.config.reward import RewardRolloutConfig
from verl_like.plugins.reward_models.server import server_command, server_environment
from verl_like.services.server import Server
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
        f"{LOSS}.topk": 8,
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
    from_file = {
        **settings,
        "distillation.teacher_models": "{}",
        "distillation.teacher_model.log_probs_file": as_file(tmp_path / "whole" / "out" / "recorded", 4),
        "actor_rollout_ref.rollout.name": "recorded",
        "actor_rollout_ref.rollout.skip_dump_dir": str(tmp_path / "whole" / "out" / "recorded"),
        "trainer.record_freq": -1,
        "trainer.total_training_steps": 4,
    }
    known = run(tmp_path / "file", tiny_model, task=task, **from_file)
    assert [r["distillation/loss"] for r in known] == [r["distillation/loss"] for r in whole]


def as_file(recorded: Path, steps: int) -> str:
    """The log-probs of a recorded run's teachers, as a file."""
    rows = []
    for number in range(1, steps + 1):
        step = read_step(step_file(recorded, number))
        rollouts, known = step.stage("rollouts", Rollouts), step.stage("evaluated", Evaluated)
        lengths = rollouts.response_length_B.tolist()
        columns = (rollouts.response_ids_T, known.teacher_log_probs_T, known.teacher_ids_T)
        cut = zip(rollouts.prompt_lists(), *(column.split(lengths) for column in columns), strict=True)
        names = ("prompt_ids", "response_ids", "log_probs", "ids")
        rows += [dict(zip(names, (p, *(each.tolist() for each in rest)), strict=True)) for p, *rest in cut]
    pq.write_table(pa.Table.from_pylist(rows), recorded / "teacher.parquet")
    return str(recorded / "teacher.parquet")


def test_a_hint_makes_a_teacher_of_the_policy_itself(tmp_path: Path, tiny_model: Path) -> None:
    task = write_task(tmp_path)
    rows = pq.read_table(task["data.train_files"]).to_pylist()
    pq.write_table(
        pa.Table.from_pylist([r | {"extra_info": r["extra_info"] | {"hint": "777"}} for r in rows]),
        task["data.train_files"],
    )
    settings = {"distillation.teacher_model.model_path": str(tiny_model), "trainer.total_training_steps": 1}
    for hint, differs in ((None, False), ("hint", True)):
        (record,) = run(tmp_path / str(hint), tiny_model, task=task, **settings, **{"distillation.hint_key": hint})
        assert (record["distillation/loss"] > 1e-3) is differs


@pytest.mark.engines
def test_a_teacher_on_vllms_own_server_is_the_frozen_one(tmp_path: Path, tiny_model: Path, teacher: Path) -> None:
    """The first step's loss is that of the same model in the trainer, to the digits on which two engines agree."""
    pytest.importorskip("vllm")
    port, rollout = free_port("127.0.0.1"), RewardRolloutConfig(name="vllm", max_model_len=64, max_num_seqs=16)
    where: dict[str, Any] = {"host": "127.0.0.1", "port": port, "device": "cpu", "trust_remote_code": False}
    command = server_command(rollout, str(teacher), **where)
    health, environment = f"http://127.0.0.1:{port}/health", server_environment("cpu", None)
    server = Server(command, health=health, log=tmp_path / "server.log", environment=environment)
    settings = {
        f"{LOSS}.loss_mode": "forward_kl_topk",
        "distillation.teacher_model.model_path": str(teacher),
        "trainer.total_training_steps": 1,
    }
    server.start()
    try:
        server.wait_ready(400)
        url = {"distillation.teacher_model.inference.url": f"http://127.0.0.1:{port}/v1"}
        (served,) = run(tmp_path / "served", tiny_model, **settings, **url, **{f"{LOSS}.topk": 4})
    finally:
        server.end()
    (frozen,) = run(tmp_path / "frozen", tiny_model, **settings, **{f"{LOSS}.topk": 4})
    assert served["distillation/loss"] == pytest.approx(frozen["distillation/loss"], rel=1e-3)


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
