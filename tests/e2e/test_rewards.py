"""Rewards in whole runs: programs in the sandbox, several sources and parts, and grading that overlaps the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from support import metrics_of, overrides, write_task

from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train

# Clock and memory readings: everything else must be equal when two runs are.
MEASURED = (
    "timing_s/",
    "timing_per_token_ms/",
    "perf/",
    "weight_sync/seconds",
    "reward/seconds/",
    "reward/run_seconds/",
    "time",
)
REWARD = """
import hashlib, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(int(hashlib.sha1(solution_str.encode()).hexdigest(), 16) % 20 / 1000)  # rows end in a strange order
    return {"score": solution_str.count("7") / 6}
"""


def write_mixed_task(folder: Path) -> dict[str, str]:
    """Half the rows are graded by running the response as a program, half by two parts."""
    task = write_task(folder)
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    for i, row in enumerate(rows):
        row["data_source"] = "codecontests" if i % 2 else "sevens"
        row["reward_model"]["ground_truth"] = '{"inputs": [""], "outputs": [""]}' if i % 2 else "7"
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    return {
        **task,
        "data.val_files": "[]",
        "+reward_model.weights.codecontests": "{code: 1.0, custom: 0.5}",
        "+reward_model.weights.sevens": "{custom: 1.0}",
        "+reward_model.rule_kwargs.code": "{bare_code: true}",
        "reward_model.sandbox.min_level": "limits",
        "custom_reward_function.num_workers": "2",
        "actor_rollout_ref.actor.old_log_probs": "recompute",
        "trainer.total_training_steps": "2",
    }


def facts(folder: Path, model: Path, name: str, **settings: Any) -> list[dict[str, Any]]:
    train(compose(overrides(write_mixed_task(folder), model, folder / name, **settings)))
    return [
        {key: value for key, value in record.items() if not key.startswith(MEASURED)}
        for record in metrics_of(folder / name)
    ]


def test_programs_and_parts_are_graded_and_overlap_changes_no_number(tmp_path: Path, tiny_model: Path) -> None:
    waiting = facts(tmp_path, tiny_model, "waiting")
    overlapping = facts(tmp_path, tiny_model, "overlapping", reward_model__launch_reward_fn_async=True)
    assert waiting == overlapping
    first = waiting[0]
    assert first["reward/failures"] == 0
    assert 0 <= first["reward/part_code/mean"] <= 1
    assert first["reward/tests_total/mean"] == 1.0
    assert "reward/sevens/score/mean" in first and "reward/codecontests/score/mean" in first
