"""Asynchronous runs: every prompt is trained once, across checkpoints, kills and restarts."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import ROOT, metrics_of, overrides, write_task
from verl_like.config.errors import ConfigError
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train

RECORDER = """
import json
from pathlib import Path
from verl_like.trainer.ppo import PPOTrainer

class Recorder(PPOTrainer):
    def make_experience(self, rollouts, scores, evaluated):
        with (Path(self.config.trainer.default_local_dir) / "groups.txt").open("a") as file:
            groups = sorted(set(rollouts.group_B.tolist()))
            ages = (self.state.weight_version - rollouts.weight_version_T).tolist()
            print(json.dumps({"step": self.state.step + 1, "groups": groups, "age": max(ages)}), file=file, flush=True)
        return super().make_experience(rollouts, scores, evaluated)
"""
ROWS, STEPS = 64, 6
SETTINGS: dict[str, Any] = {
    "trainer.mode": "colocate_async",
    "algorithm.rollout_correction.rollout_is": "token",
    "async_training.max_staleness": 2,
    "trainer.total_training_steps": STEPS,
    "data.max_response_length": 24,
}
SEPARATE = {
    "trainer.mode": "separate_async",
    "trainer.launcher": "ray",
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
}


def line_of(folder: Path, model: Path, **settings: Any) -> list[str]:
    """A command line whose run writes down what each step trains."""
    (folder / "recorder.py").write_text(RECORDER)
    recorder = {"trainer.trainer_class": f"{folder / 'recorder.py'}:Recorder"}
    return overrides(write_task(folder, ROWS), model, folder / "out", **SETTINGS | recorder | settings)


def trained(out: Path) -> dict[int, list[int]]:
    """The groups of each step; of one that was made twice, those of the last time."""
    records = [json.loads(line) for line in (out / "groups.txt").read_text().splitlines()]
    assert all(record["age"] <= 2 for record in records)
    return {record["step"]: record["groups"] for record in records}


def assert_each_once(out: Path, steps: int) -> None:
    groups = trained(out)
    assert sorted(groups) == list(range(1, steps + 1))
    assert sorted(group for step in groups.values() for group in step) == list(range(8 * steps))
    assert f"{8 * steps} drawn = {8 * steps} trained" in (out / "verl_like.log").read_text()


def test_a_run_and_its_resume_train_every_prompt_once(tmp_path: Path, tiny_model: Path) -> None:
    """From the middle on: what was under way there goes on from its tokens."""
    out = tmp_path / "out"
    train(compose(line_of(tmp_path, tiny_model, **{"trainer.save_freq": 3})))
    assert_each_once(out, STEPS)
    first = metrics_of(out)
    assert len(first) == STEPS and max(record["staleness/max"] for record in first) <= 2
    assert (out / "global_step_3" / "under_way.npz").exists()
    newest = out / f"global_step_{STEPS}"
    newest.rename(tmp_path / "rejected")
    (out / "latest_checkpointed_iteration.txt").write_text("3")
    train(compose(line_of(tmp_path, tiny_model, **{"trainer.save_freq": 3})))
    assert_each_once(out, STEPS)
    assert re.search(r"prompts: \d+ drawn = 24 trained", (out / "verl_like.log").read_text())


def test_a_run_without_a_correction_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"trainer.mode=colocate_async with algorithm.rollout_correction.rollout_is=None.*leave rollout_is o",
    ):
        compose(line_of(tmp_path, tiny_model, **{"algorithm.rollout_correction.rollout_is": None}))


@pytest.mark.engines
def test_a_pool_of_its_own_samples_while_the_policy_trains(tmp_path: Path, tiny_model: Path) -> None:
    """The policy learns, validation has its answers, a step is profiled, and each prompt is trained once."""
    more = {"trainer.total_training_steps": 8, "trainer.test_freq": 4, "trainer.profile_steps": "[3]"}
    command = line_of(tmp_path, tiny_model, **SEPARATE, **more, **{"data.max_response_length": 6})
    train(compose(command))
    records = metrics_of(tmp_path / "out")
    assert_each_once(tmp_path / "out", 8)
    early, late = (sum(record["critic/score/mean"] for record in part) / 2 for part in (records[:2], records[-2:]))
    assert late > 1.5 * early
    assert any(name.startswith("val-core/") for name in records[3])
    assert max(record["async/running_groups"] for record in records) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_rollout_pool_is_begun_again_and_nothing_is_lost(tmp_path: Path, tiny_model: Path) -> None:
    out, steps = tmp_path / "out", 8
    more = {"trainer.total_training_steps": steps, "trainer.save_freq": 1, "trainer.max_restarts": 2}
    command = line_of(tmp_path, tiny_model, **SEPARATE, **more, **{"trainer.restart_delay": 0})
    run = subprocess.Popen(
        [sys.executable, "-m", "verl_like.trainer.main_ppo", *command],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 200
        while not (out / "global_step_3").exists():
            assert run.poll() is None and time.monotonic() < deadline, (run.communicate(timeout=60)[0] or "")[-4000:]
            time.sleep(0.05)
        found = re.findall(r"=== rank 0 of 1, run \w+, process (\d+)", (out / "workers/rollout_rank0.log").read_text())
        os.kill(int(found[-1]), signal.SIGKILL)
        text = run.communicate(timeout=200)[0]
    finally:
        run.kill()
    assert run.returncode == 0, text[-4000:]
    assert "rollout rank 0 of 1: its process died" in text and "restart 1 of 2" in text
    assert_each_once(out, steps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_runs_that_are_killed_again_and_again_lose_no_prompt(tmp_path: Path, tiny_model: Path) -> None:
    """kill -9 of the driver at moments spread over steps, saves and renames."""
    out, kills, num_kills = tmp_path / "out", 6, 0
    command = line_of(tmp_path, tiny_model, **{"trainer.save_freq": 1, "trainer.total_training_steps": 8})
    for attempt in range(30):
        with (tmp_path / f"log_{attempt}").open("w") as log:
            run = subprocess.Popen(
                [sys.executable, "-m", "verl_like.trainer.main_ppo", *command],
                cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
            )  # fmt: skip
        newest = _newest(out)
        while run.poll() is None and num_kills < kills and _newest(out) == newest:
            time.sleep(0.01)
        if num_kills < kills and run.poll() is None:
            time.sleep(0.07 * attempt)
            run.kill()
            num_kills += 1
        if run.wait() == 0:
            break
        assert run.returncode == -signal.SIGKILL, (tmp_path / f"log_{attempt}").read_text()
    assert num_kills == kills and run.returncode == 0
    assert_each_once(out, 8)


def _newest(out: Path) -> str:
    marker = out / "latest_checkpointed_iteration.txt"
    return marker.read_text() if marker.exists() else ""


@pytest.mark.engines
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        pytest.param(signal.SIGKILL, "its process died", id="killed"),
        pytest.param(signal.SIGSTOP, "was stopped", id="stopped", marks=pytest.mark.slow),
    ],
)
def test_a_lost_replica_is_replaced_and_the_run_goes_on(
    fault: signal.Signals, why: str, tmp_path: Path, tiny_model: Path
) -> None:
    """No restart: the other replica takes over what it had, a third process joins with proved weights."""
    out = tmp_path / "out"
    own = SEPARATE | {"actor_rollout_ref.rollout.n_gpus_per_node": 2}
    more = {"trainer.total_training_steps": 10_000, "data.max_response_length": 64, "trainer.stall_timeout": 10}
    command = line_of(tmp_path, tiny_model, **own, **more)
    run = subprocess.Popen(
        [sys.executable, "-m", "verl_like.trainer.main_ppo", *command],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        _wait_for(run, lambda: _num_steps(out) >= 3)
        log = (out / "workers" / "rollout1_rank0.log").read_text()
        os.kill(int(re.findall(r"=== rank 0 of 1, run \w+, process (\d+)", log)[-1]), fault)
        said = "2 of 2 rollout replicas are there again"
        _wait_for(run, lambda: said in (out / "verl_like.log").read_text())
        there = _num_steps(out)
        _wait_for(run, lambda: _num_steps(out) >= there + 3)
        run.send_signal(signal.SIGINT)
        text = run.communicate(timeout=200)[0]
    finally:
        run.kill()
    assert (
        "1 of 2 rollout replicas go on" in text
        and f"rollout1 rank 0 of 1{':' if fault == signal.SIGKILL else ''} {why}" in text
    )
    assert (out / "workers" / "rollout2_rank0.log").exists()
    groups = [group for step in trained(out).values() for group in step]
    assert len(set(groups)) == len(groups) == 8 * len(trained(out))


def _num_steps(out: Path) -> int:
    return len(trained(out)) if (out / "groups.txt").exists() else 0


def _wait_for(run: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 400
    while not reached():
        assert run.poll() is None and time.monotonic() < deadline, (run.communicate(timeout=60)[0] or "")[-4000:]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=pytest.mark.engines), "hf"])
def test_thirty_kills_lose_no_prompt(engine: str, tmp_path: Path, tiny_model: Path) -> None:
    """kill -9 of rollout replicas (the run goes on), of the trainer (it begins again by itself) and of the driver (it
    is started again), at moments spread over steps, saves and starts, in one run; the last leg ends it."""
    out, kills = tmp_path / "out", random.Random(1)
    own = SEPARATE | {"actor_rollout_ref.rollout.n_gpus_per_node": 2, "actor_rollout_ref.rollout.name": engine}
    more = {
        "trainer.save_freq": 2,
        "trainer.max_restarts": 99,
        "trainer.restart_delay": 0,
        "trainer.max_actor_ckpt_to_keep": 2,
    }
    command = line_of(tmp_path, tiny_model, **own, **more)
    victims = ["rollout", "rollout", "worker", "rollout", "driver"] * 6
    with (tmp_path / "log").open("a") as log:

        def started(steps: int) -> subprocess.Popen[str]:
            arguments = [
                sys.executable,
                "-m",
                "verl_like.trainer.main_ppo",
                *command,
                f"trainer.total_training_steps={steps}",
            ]
            return subprocess.Popen(arguments, cwd=ROOT, stdout=log, stderr=log, text=True)

        run = started(100_000)
        try:
            for victim in victims:
                there = _num_lines(out)
                _wait_for(run, lambda there=there: _num_lines(out) >= there + 3)
                time.sleep(kills.random() * 2)
                if victim == "driver":
                    run.kill()
                    run.wait()
                    run = started(100_000)
                else:
                    os.kill(kills.choice(_living(out, victim)), signal.SIGKILL)
            there = _num_lines(out)
            _wait_for(run, lambda: _num_lines(out) >= there + 3)
            run.send_signal(signal.SIGINT)
            assert run.wait(200) == 0
            steps = max(trained(out)) + 3
            run = started(steps)
            assert run.wait(400) == 0
        finally:
            run.kill()
    groups = [group for step in trained(out).values() for group in step]
    assert len(groups) == len(set(groups)) == 8 * steps
    told = re.findall(
        r"([\d,]+) drawn = ([\d,]+) trained \+ 0 without a signal \+ 0 aborted \+ 0 too old \+ ([\d,]+) not trained",
        (out / "verl_like.log").read_text(),
    )[-1]
    drawn, used, left = (int(number.replace(",", "")) for number in told)
    assert used == 8 * steps and drawn == used + left and max(groups) < drawn


def _num_lines(out: Path) -> int:
    """Steps that were begun, also those that were made again."""
    file = out / "groups.txt"
    return len(file.read_text().splitlines()) if file.exists() else 0


def _living(out: Path, name: str) -> list[int]:
    """Ids of the processes with these logs that live."""
    found = []
    for log in (out / "workers").glob(f"{name}*_rank*.log"):
        pid = re.findall(r"=== rank \d+ of \d+, run \w+, process (\d+)", log.read_text())[-1]
        if Path(f"/proc/{pid}").exists():
            found.append(int(pid))
    return found
