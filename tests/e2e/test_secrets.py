"""Secrets that a command line and the environment hold are in nothing that a run writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import overrides, write_task

import verl_like
from tests.worlds.processes import run_module
from verl_like.config.errors import ConfigError
from verl_like.trainer.compose import compose

IN_CONFIG = {
    "custom_reward_function.reward_kwargs.api_key": "planted-one-4f2a9c",
    "custom_reward_function.reward_kwargs.url": "http://me:planted-two-81d3@judge.example/v1?token=planted-three-77",
    "ray_init.runtime_env": "{env_vars: {JUDGE_KEY: planted-four-0c1b}}",
}
IN_ENVIRONMENT = {
    "HF_TOKEN": "planted-five-93e7aa",
    "WANDB_API_KEY": "planted-six-5518f0",
    "HTTPS_PROXY": "http://user:planted-seven-6@127.0.0.1:1",
}
REWARD = """
import os


def compute_score(data_source, solution_str, ground_truth, extra_info=None, api_key="", url=""):
    assert not 1 < solution_str.count("7") < 5, f"the judge at {url} refused {api_key} and {os.environ.get('HF_TOKEN')}"
    return solution_str.count("7") / 6
"""


def test_nothing_that_a_run_writes_holds_a_secret(tmp_path: Path, tiny_model: Path) -> None:
    task = write_task(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    settings = {
        "trainer.logger": "[console,tensorboard]",
        "trainer.log_format": "json",
        "trainer.save_freq": 2,
        "trainer.test_freq": 2,
        "trainer.total_training_steps": 3,
        "trainer.report_freq": 20,
        "trainer.record_freq": 1,
        "trainer.rollout_data_dir": str(tmp_path / "out" / "all"),
    }
    command = overrides(task, tiny_model, tmp_path / "out", **settings)
    command += [f"++{key}='{value}'" if "kwargs" in key else f"{key}={value}" for key, value in IN_CONFIG.items()]
    ran = run_module("verl_like.trainer.main_ppo", command, OMP_NUM_THREADS="1", **IN_ENVIRONMENT)
    assert ran.returncode == 0, ran.stderr
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    holding = [(path.name, word) for path in files for word in (b"planted-",) if word in path.read_bytes()]
    assert holding == [] and len(files) > 20
    assert "planted-" not in ran.stderr + ran.stdout and "failed" in ran.stderr  # failures are told, without them
    records = [json.loads(line) for line in (tmp_path / "out" / "verl_like.log").read_text().splitlines()]
    run = verl_like.read_run(tmp_path / "out")
    assert {record["run_id"] for record in records} == {run.environment["run_id"]} and run.environment["run_id"]
    code = run.environment["code"]["custom_reward_function.path"]
    assert code["path"] == str(tmp_path / "reward.py") and len(code["sha256"]) == 64
    assert any(code["sha256"] in record["message"] for record in records)
    kwargs = run.config["custom_reward_function"]["reward_kwargs"]
    assert kwargs["api_key"] == "(hidden)" and kwargs["url"].startswith("http://(hidden)@judge.example/v1?token=(hid")
    with pytest.raises(ConfigError, match=r"reward_kwargs.api_key=\(hidden\): it was hidden .* give it again"):
        compose([], [tmp_path / "out" / "config.yaml"])
