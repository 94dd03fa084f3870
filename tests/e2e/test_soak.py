"""Long and slow: hundreds of steps leave memory and handles where they were; a busy machine is no stuck one."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, main_ppo, metrics_of, overrides, write_task


def held(pid: int) -> dict[str, int]:
    """By a process and all its children: bytes (of those that several have, each has its share), file descriptors,
    threads, processes."""
    found = {"bytes": 0, "handles": 0, "threads": 0, "processes": 0}
    for each in (pid, *_below(pid)):
        try:
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{each}/status").read_text().splitlines())
            shares = re.search(r"Pss: +(\d+) kB", Path(f"/proc/{each}/smaps_rollup").read_text())
            handles = len(list(Path(f"/proc/{each}/fd").iterdir()))
        except OSError:  # it has ended; one that is just ending holds no memory
            continue
        found["bytes"] += int(shares[1]) * 1024 if shares else 0
        found["threads"] += int(fields["Threads"])
        found["handles"] += handles
        found["processes"] += 1
    return found


def _below(pid: int) -> list[int]:
    try:
        text = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return []
    children = [int(child) for child in text.split()]
    return children + [other for child in children for other in _below(child)]


def most_held(folder: Path, model: Path, steps: int, every: int = 1, **settings: Any) -> dict[str, tuple[int, int]]:
    """The most that a run of so many steps held in its second quarter, and in its last: looked at when every so many
    steps are done. SOAK_MINUTES: then it is asked to stop, and quarters are those of the steps that it made."""
    out, seen = folder / "out", dict[int, dict[str, int]]()
    command = [sys.executable, "-m", "verl_like.trainer.main_ppo"]
    settings |= {"trainer__total_training_steps": steps, "trainer__max_actor_ckpt_to_keep": 1}
    command += overrides(write_task(folder), model, out, **settings)
    end = time.monotonic() + 60 * float(os.environ.get("SOAK_MINUTES", "inf"))
    with (folder / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
        try:
            while run.poll() is None:
                file = out / "metrics.jsonl"
                done = file.read_bytes().count(b"\n") if file.exists() else 0
                if done and done not in seen and done % every == 0:
                    seen[done] = held(run.pid)
                if time.monotonic() > end:
                    run.terminate()
                    end = math.inf
                time.sleep(0.02)
        finally:
            run.kill()
    assert run.returncode == 0, (folder / "log").read_text()[-3000:]
    made = max(seen)
    early = [what for step, what in seen.items() if made // 4 <= step < made // 2]
    late = [what for step, what in seen.items() if 3 * made // 4 <= step <= made - 2 * every]
    assert len(early) > 10 and len(late) > 10
    most = {key: (max(e[key] for e in early), max(e[key] for e in late)) for key in early[0]}
    print(made, "steps:", most)
    return most


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_of_steps_hold_no_more_than_the_first(tmp_path: Path, tiny_model: Path) -> None:
    """One process, with checkpoints, validations and a report; what is held is compared at the same point of a step."""
    settings: dict[str, Any] = {
        "trainer.save_freq": 20,
        "trainer.test_freq": 20,
        "trainer.report_freq": 20,
        "actor_rollout_ref.actor.optim.lr": 1e-5,  # responses stay of the same lengths
    }
    most = most_held(tmp_path, tiny_model, int(os.environ.get("SOAK_STEPS", "300")), **settings)
    assert most["bytes"][1] < 1.03 * most["bytes"][0], most
    for key in ("handles", "threads", "processes"):
        assert most[key][1] <= most[key][0], most


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.timeout(4 * 3600)
def test_two_thousand_steps_of_two_ranks_with_vllm(tmp_path: Path, tiny_model: Path) -> None:
    """Two ranks and the driver under Ray, small batches, a checkpoint and a validation every hundred steps."""
    settings: dict[str, Any] = {
        "trainer.launcher": "ray",
        "trainer.n_gpus_per_node": 2,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 2,
        "data.train_batch_size": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "trainer.save_freq": 100,
        "trainer.test_freq": 100,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
    }
    most = most_held(tmp_path, tiny_model, int(os.environ.get("SOAK_STEPS", "2000")), every=5, **settings)
    assert most["bytes"][1] < 1.03 * most["bytes"][0], most
    for key in ("handles", "threads", "processes"):
        assert most[key][1] <= 1.02 * most[key][0], most


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.timeout(1800)
def test_a_busy_machine_is_no_stuck_one(tmp_path: Path, tiny_model: Path) -> None:
    """Two ranks with a limit of seconds, beside four busy processes for each core."""
    out = tmp_path / "out"
    settings = {"trainer.launcher": "ray", "trainer.n_gpus_per_node": 2, "trainer.stall_timeout": 10}
    settings |= {"trainer.save_freq": 1, "trainer.test_freq": 2, "trainer.total_training_steps": 4}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * (os.cpu_count() or 1))]
    try:
        done = main_ppo(overrides(write_task(tmp_path), tiny_model, out, **settings), timeout=1200)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(metrics_of(out)) == 4 and not (out / "workers" / "stall.txt").exists()
