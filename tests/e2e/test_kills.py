"""Runs that are killed, spoilt or refused: what the next run takes up, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, metrics_of, overrides, write_task

from verl_like.config.errors import ConfigError
from verl_like.trainer.build import prepared, started
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train

MEASURED = ("timing_s/", "timing_per_token_ms/", "perf/", "weight_sync/seconds", "reward/seconds/", "time")


def facts(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if not name.startswith(MEASURED)}


def steps_in_file(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def newest_step(out: Path) -> str:
    marker = out / "latest_checkpointed_iteration.txt"
    return marker.read_text() if marker.exists() else ""


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
@pytest.mark.timeout(900)
def test_a_run_killed_again_and_again_ends_as_the_one_that_was_not(tmp_path: Path, tiny_model: Path) -> None:
    """kill -9 at moments spread over steps, saves and renames; the next start takes the lock over."""
    task, steps, kills = write_task(tmp_path), 12, 3
    settings = {"trainer.save_freq": 1, "trainer.max_actor_ckpt_to_keep": 1, "trainer.total_training_steps": steps}
    train(compose(overrides(task, tiny_model, tmp_path / "whole", **settings)))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "verl_like.trainer.main_ppo", *overrides(task, tiny_model, out, **settings)]
    num_kills = 0
    for attempt in range(20):
        with (tmp_path / f"log_{attempt}").open("w") as log:
            run = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
        try:
            newest = newest_step(out)
            while run.poll() is None and num_kills < kills and newest_step(out) == newest:
                time.sleep(0.01)
            if num_kills < kills:
                time.sleep(0.2 * attempt)
                run.kill()
                num_kills += 1
            run.wait()
        finally:
            run.kill()
        if run.returncode == 0:
            break
        assert run.returncode == -signal.SIGKILL, (tmp_path / f"log_{attempt}").read_text()
    assert num_kills == kills and run.returncode == 0
    assert steps_in_file(out) == list(range(1, steps + 1))
    for expected, actual in zip(metrics_of(tmp_path / "whole"), metrics_of(out), strict=True):
        assert facts(actual) == facts(expected)
    assert sorted(path.name for path in out.glob("global_step_*")) == [f"global_step_{steps}"]
