"""The main job, really run on a CPU: Ray, two gloo ranks, FSDP2, vLLM, weight sync, rewards, updates, checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from support import ROOT, main_ppo, metrics_of, overrides, shm_left_behind, write_task

ON_RAY = {"trainer.launcher": "ray", "trainer.n_gpus_per_node": 2, "actor_rollout_ref.rollout.name": "vllm"}


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Sixteen steps of GRPO on two ranks with vLLM; shared by the tests of its results."""
    folder = tmp_path_factory.mktemp("grpo")
    before = shm_left_behind()
    settings = {
        **ON_RAY,
        "trainer.total_training_steps": 16,
        "trainer.test_freq": 8,
        "trainer.val_before_train": True,
        "trainer.save_freq": 8,
        "trainer.max_actor_ckpt_to_keep": 1,
        "trainer.validation_data_dir": str(folder / "val_samples"),
        "trainer.rollout_data_dir": str(folder / "samples"),
        "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.actor.old_log_probs": "recompute",
        "actor_rollout_ref.rollout.val_kwargs.do_sample": False,
    }
    result = main_ppo(overrides(write_task(folder), tiny_model, folder / "out", **settings))
    assert result.returncode == 0, result.stdout
    wait_for(lambda: shm_left_behind() <= before, 10)
    return folder


def test_the_reward_rises(grpo_run: Path) -> None:
    scores = [record["critic/score/mean"] for record in metrics_of(grpo_run / "out")[1:]]
    assert len(scores) == 16
    assert sum(scores[-4:]) / 4 > sum(scores[:4]) / 4 + 0.15


def test_trainer_and_rollout_engine_agree_after_every_sync(grpo_run: Path) -> None:
    records = metrics_of(grpo_run / "out")[1:]
    assert max(record["weight_sync/probe_gap"] for record in records) < 1e-5
    assert max(record["training/rollout_probs_diff_max"] for record in records) < 1e-4


def test_the_first_update_is_on_policy(grpo_run: Path) -> None:
    first = metrics_of(grpo_run / "out")[1]
    assert abs(first["actor/ppo_kl"]) < 1e-6
    assert first["actor/pg_clipfrac"] == 0.0
    assert first["actor/grad_norm"] > 0.0
    assert first["actor/skipped_steps"] == 0.0


def test_validation_metrics_and_samples_are_written(grpo_run: Path) -> None:
    records = metrics_of(grpo_run / "out")
    assert [i for i, record in enumerate(records) if "val-core/sevens/acc/mean@1" in record] == [0, 8, 16]
    assert {path.name for path in (grpo_run / "val_samples").iterdir()} == {f"{step:06d}.jsonl" for step in (0, 8, 16)}
    assert len((grpo_run / "samples" / "000003.jsonl").read_text().splitlines()) == 64


def test_checkpoint_is_rotated_and_opens_with_transformers(grpo_run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = grpo_run / "out"
    assert [path.name for path in sorted(out.glob("global_step_*"))] == ["global_step_16"]
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "16"
    exported = out / "global_step_16" / "actor" / "huggingface"
    assert AutoModelForCausalLM.from_pretrained(exported).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(exported).decode([3, 4]) == "01"


@pytest.mark.slow
def test_a_finished_run_resumes_to_nothing_and_a_longer_one_goes_on(grpo_run: Path, tiny_model: Path) -> None:
    settings = {**ON_RAY, "trainer.total_training_steps": 17, "trainer.save_freq": -1}
    result = main_ppo(overrides(write_task(grpo_run), tiny_model, grpo_run / "out", **settings))
    assert result.returncode == 0, result.stdout
    assert "resuming from" in result.stdout
    assert [int(record["training/global_step"]) for record in metrics_of(grpo_run / "out")[-2:]] == [16, 17]


@pytest.mark.engines
def test_ppo_with_a_critic_and_tensor_parallel_vllm(tmp_path: Path, tiny_model: Path) -> None:
    """One vLLM replica over both ranks, filled from a full state dict; the critic trains beside it."""
    settings = {
        **ON_RAY,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "actor_rollout_ref.rollout.load_format": "dummy_hf",
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "critic.ppo_mini_batch_size": 4,
        "trainer.total_training_steps": 3,
    }
    result = main_ppo(overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **settings))
    assert result.returncode == 0, result.stdout
    records = metrics_of(tmp_path / "out")
    assert len(records) == 3
    assert all(record["weight_sync/probe_gap"] < 1e-5 for record in records)
    assert all(record["critic/vf_loss"] > 0 and record["critic/grad_norm"] > 0 for record in records)
    assert records[0]["critic/kl"] == pytest.approx(0.0, abs=1e-6) and records[2]["critic/kl"] != 0.0


def test_ctrl_c_saves_and_leaves_nothing_behind(tmp_path: Path, tiny_model: Path) -> None:
    before = shm_left_behind()
    settings = {**ON_RAY, "actor_rollout_ref.rollout.name": "hf", "trainer.total_training_steps": 5000}
    arguments = overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **settings)
    command = [sys.executable, "-m", "verl_like.trainer.main_ppo", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(lambda: (tmp_path / "out" / "metrics.jsonl").exists() and len(metrics_of(tmp_path / "out")) > 1)
            os.killpg(run.pid, signal.SIGINT)  # what a terminal does: the driver and everything it started
            assert run.wait(timeout=60) == 130, (tmp_path / "log").read_text()
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
    saved = int((tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text())
    assert saved == len(metrics_of(tmp_path / "out"))
    assert (tmp_path / "out" / f"global_step_{saved}" / "trainer_state.json").is_file()
    wait_for(lambda: not processes_of_session(run.pid))
    assert shm_left_behind() <= before


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)


def processes_of_session(session: int) -> list[int]:
    """Processes that still belong to the driver's session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(folder.name))
    return found
