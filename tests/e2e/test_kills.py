"""Runs that are killed, spoilt or refused: what the next run takes up, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, metrics_of, overrides, write_task

from verl_like.config.errors import ConfigError
from verl_like.trainer.build import prepared, started
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train


def steps_in_file(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_damaged_shard_sends_a_run_back_one_checkpoint(tmp_path: Path, tiny_model: Path) -> None:
    """It trains the lost steps again, to the same numbers, and each step stands in the metrics once."""
    settings: dict[str, Any] = {"trainer.save_freq": 1, "trainer.total_training_steps": 2}
    settings["actor_rollout_ref.actor.optim.total_training_steps"] = 3
    task, out = write_task(tmp_path), tmp_path / "out"
    train(compose(overrides(task, tiny_model, out, **settings)))
    before = metrics_of(out)
    shard = out / "global_step_2" / "actor" / "model" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 16
    shard.write_bytes(data)
    settings["actor_rollout_ref.actor.optim.lr"] = 1e-3
    train(compose(overrides(task, tiny_model, out, **settings | {"trainer.total_training_steps": 3})))
    log = (out / "verl_like.log").read_text()
    assert f"{shard} is damaged" in log and "Resuming from" in log
    assert "actor_rollout_ref.actor.optim.lr: 0.003 -> 0.001" in log
    assert steps_in_file(out) == [1, 2, 3]
    assert metrics_of(out)[1]["actor/lr"] == 1e-3 and metrics_of(out)[1]["actor/pg_loss"] == before[1]["actor/pg_loss"]
    for name in ("config.yaml", "checksums.json", "actor/huggingface/config.json", "actor/huggingface/tokenizer.json"):
        assert (out / "global_step_3" / name).is_file(), name
    assert not (out / "run.lock").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "nowhere/global_step_3"}, "does not exist"),
        ({"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "nowhere"}, "must be global_step_<number>"),
    ],
)
def test_a_resume_that_cannot_be_is_refused_before_workers_start(
    tmp_path: Path, tiny_model: Path, settings: dict[str, str], message: str
) -> None:
    def start(*arguments: Any) -> Any:
        pytest.fail("workers were started")

    config = compose(overrides(write_task(tmp_path), tiny_model, tmp_path / "out", **settings))
    with pytest.raises(ConfigError, match=message), prepared(config) as ready, started(ready, start):
        pass


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    ("algorithm", "kills", "options"),
    [
        ("grpo", 85, []),
        ("ppo", 85, []),
        pytest.param("grpo", 15, ["--vllm"], marks=pytest.mark.engines),
        pytest.param("ppo", 15, ["--vllm"], marks=pytest.mark.engines),
    ],
)
def test_kills_cost_no_more_than_the_step_under_way(algorithm: str, kills: int, options: list[str]) -> None:
    """At moments left to chance, over starts, steps, saves and renames; of one process, or of two ranks with vLLM and
    their driver. The run ends as the one that nothing happened to."""
    command = [sys.executable, "-m", "benchmarks.kills", "--algorithm", algorithm, "--kills", f"{kills}", *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
    assert done.returncode == 0
    ledger = json.loads(done.stdout.splitlines()[-1])
    assert ledger["kills"] == kills and set(ledger["lost"]) <= {"0", "1"}
    assert ledger["steps_once"] and not ledger["different"] and not ledger["left_behind"]
