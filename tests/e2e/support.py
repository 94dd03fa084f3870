"""Small real runs for end-to-end tests: a task that a random model learns in seconds, command lines, and their results.

The task: answer with as many "7" as possible. A random model does so one time in eighteen, and a few steps of policy
gradient change that for certain, so that "the reward rises" can be asserted without luck.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.worlds.processes import run_module

ROOT = Path(__file__).resolve().parents[2]
# Begins of the names of metrics that two equal runs need not have in common.
MEASURED = ("timing_s/", "timing_per_token_ms/", "perf/", "weight_sync/seconds", "reward/seconds/", "time")

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    sevens = solution_str.count(ground_truth) / 6
    return {"score": sevens, "acc": float(sevens > 0.5)}
"""


def write_task(folder: Path, num_rows: int = 64) -> dict[str, str]:
    """Parquet files and a reward file in `folder`; the overrides that name them."""
    rows = [
        {
            "data_source": "sevens",
            "prompt": [{"role": "user", "content": f"{i % 10}{i // 10 % 10}+{i % 7}="}],
            "ability": "count",
            "reward_model": {"style": "rule", "ground_truth": "7"},
            "extra_info": {"index": i},
        }
        for i in range(num_rows)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:16]), folder / "val.parquet")
    (folder / "reward.py").write_text(REWARD)
    return {
        "data.train_files": str(folder / "train.parquet"),
        "data.val_files": str(folder / "val.parquet"),
        "custom_reward_function.path": str(folder / "reward.py"),
    }


def overrides(task: dict[str, str], model: Path, out: Path, **settings: Any) -> list[str]:
    """A whole command line: GRPO on the task, one update a step, everything small. `settings` use __ for dots."""
    values: dict[str, Any] = {
        **task,
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 8,
        "data.max_response_length": 6,
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 256,
        "actor_rollout_ref.actor.optim.lr": 3e-3,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.name": "hf",
        "trainer.launcher": "local",
        "trainer.device": "cpu",
        "trainer.default_local_dir": str(out),
        "trainer.val_before_train": False,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.total_training_steps": 4,
        "trainer.report_freq": -1,  # a second of CPU a run; tests/e2e/test_run_folder.py has it on
    }
    values |= {name.replace("__", "."): value for name, value in settings.items()}
    return [f"{name}={'null' if value is None else value}" for name, value in values.items()]


def main_ppo(arguments: Sequence[str], timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """`python -m verl_like.trainer.main_ppo` as a user runs it; all it says. With Ray or vLLM it is no fork."""
    module, env = "verl_like.trainer.main_ppo", {"OMP_NUM_THREADS": "1"}
    if {"trainer.launcher=local", "actor_rollout_ref.rollout.name=hf"} <= set(arguments):
        return run_module(module, arguments, joined=True, timeout=timeout, **env)
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def run_script(script: Path, *arguments: str, timeout: float, **env: str) -> subprocess.CompletedProcess[str]:
    """A recipe's run.sh whose programs run as in main_ppo(): the shell is given a PYTHON that notes its command lines.

    Programs named by a file ("$HERE/prepare.py") run at once, in a Python of their own."""
    with tempfile.TemporaryDirectory() as folder:
        noted, python = Path(folder) / "noted", Path(folder) / "python"
        python.write_text(
            f"""#!/bin/sh\n[ "$1" = -m ] || exec {sys.executable} "$@"\nprintf '%s\\0' "$@" > {noted}\n"""
        )
        python.chmod(0o700)
        environment = {**os.environ, **env, "PYTHON": str(python), "OMP_NUM_THREADS": "1"}
        shell = ["bash", str(script), *arguments]
        done = subprocess.run(shell, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        _, module, *words = noted.read_text().removesuffix("\0").split("\0")
    return run_module(module, words, joined=True, timeout=timeout, OMP_NUM_THREADS="1", **env)


def metrics_of(out: Path) -> list[dict[str, Any]]:
    """The run's metrics, one record a step, in order; several lines of one step joined."""
    from verl_like.observe.run_folder import read_metrics

    (path,) = out.glob("*.jsonl")
    return [record for _, record in sorted(read_metrics(path).items())]


def shm_left_behind() -> set[str]:
    """Names in shared memory that no living process has mapped or open: other tests may run at the same time."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return set()
    entries = {entry.name for entry in folder.iterdir()}
    return entries - {name for process in Path("/proc").glob("[0-9]*") for name in _shm_names(process)}


def _shm_names(process: Path) -> set[str]:
    """Entries of /dev/shm that a process holds; nothing of one that has just ended or is another user's."""
    try:
        mapped = re.findall(r"/dev/shm/(\S+)", (process / "maps").read_text())
        opened = [os.readlink(link) for link in (process / "fd").iterdir()]
    except OSError:
        return set()
    return {*mapped, *(path.removeprefix("/dev/shm/") for path in opened if path.startswith("/dev/shm/"))}


def dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def with_answers(folder: Path, model: Path, name: str, rows: list[Any], **more: Any) -> list[str]:
    """Write `rows` to files; a command line in verl's names that trains on 8 a step, in micro-batches of few tokens."""
    for split, some in (("train", rows), ("val", rows[:6])):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, some)))
    values: dict[str, Any] = {
        "data.train_files": folder / "train.jsonl",
        "data.train_batch_size": 8,
        "data.max_length": 200,
        "data.max_token_len_per_gpu": 120,
        "data.shuffle": False,
        "model.path": model,
        "model.enable_gradient_checkpointing": False,
        "optim.lr": 1e-2,
        "optim.eps": 1e-4,
        "optim.lr_warmup_steps_ratio": 0,
        "optim.lr_scheduler_type": "constant",
        "trainer.device": "cpu",
        "trainer.launcher": "local",
        "trainer.default_local_dir": folder / name,
        "trainer.total_training_steps": 3,
        "trainer.report_freq": -1,
    }
    return [f"{key}={value}" for key, value in (values | more).items()]
