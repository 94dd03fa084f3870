"""Runs with data.curriculum: a resumed one draws and learns what the uninterrupted one does; more groups are mixed."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.support import MEASURED, ROOT, metrics_of, overrides, write_task
from verl_like.trainer.compose import compose
from verl_like.trainer.main_ppo import train

ON = {"data.curriculum.enable": True}


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, tiny_model: Path) -> None:
    task = write_task(tmp_path, num_rows=16)
    learn = {**ON, "data.curriculum.min_signal": 0.5, "data.curriculum.success_above": 0.3}
    filtered = {"algorithm.filter_groups.enable": True, "data.train_batch_size": 4, "data.gen_batch_size": 8}
    every: dict[str, Any] = {**learn, **filtered, "actor_rollout_ref.actor.ppo_mini_batch_size": 4}

    def run(name: str, steps: int) -> list[dict[str, Any]]:
        keys = {**every, "trainer.save_freq": 2, "trainer.total_training_steps": steps}
        train(compose(overrides(task, tiny_model, tmp_path / name, **keys)))
        told = metrics_of(tmp_path / name)
        return [{k: v for k, v in record.items() if not k.startswith(MEASURED)} for record in told]

    whole = run("whole", 4)
    run("cut", 2)
    assert run("cut", 4) == whole
    assert whole[-1]["curriculum/pool/fresh"] < whole[0]["curriculum/pool/fresh"] < 1


@pytest.mark.slow
def test_more_groups_are_mixed_than_of_a_uniform_draw(tmp_path: Path) -> None:
    """The quickstart's model, which adds without carrying: a third of the questions are solved, a third hopeless."""
    sys.path.insert(0, str(ROOT / "recipes" / "quickstart"))
    import prepare  # pyright: ignore[reportMissingImports]

    prepare.prepare(tmp_path, prepare.Recipe())
    pairs, _ = prepare.split_pairs(1, 512)
    chance = random.Random(3)
    chance.shuffle(pairs)
    known = [pair for pair in pairs if prepare.sloppy_sum(pair) == sum(pair)][:256]
    carried = [pair for pair in pairs if prepare.sloppy_sum(pair) != sum(pair)][:256]
    longer = [(chance.randrange(100, 500), chance.randrange(100, 500)) for _ in range(256)]
    rows = prepare.rows([*known, *carried, *longer], "train")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mixed.parquet")
    task = {
        "data.train_files": str(tmp_path / "mixed.parquet"),
        "data.val_files": str(tmp_path / "data" / "val.parquet"),
        "custom_reward_function.path": str(ROOT / "recipes" / "quickstart" / "reward.py"),
    }
    keys: dict[str, Any] = {
        "data.train_batch_size": 64,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096,
        "actor_rollout_ref.actor.optim.lr": 4e-4,
        "trainer.total_training_steps": 36,
    }
    mixed = {}
    for on in (False, True):
        out = tmp_path / f"out_{on}"
        train(compose(overrides(task, tmp_path / "model", out, **{**keys, "data.curriculum.enable": on})))
        told = metrics_of(out)[-12:]
        mixed[on] = sum(1 - record["critic/group_zero_std_fraction"] for record in told) / len(told)
    print(f"share of mixed groups in the last 12 of 36 steps: uniform {mixed[False]:.3f}, curriculum {mixed[True]:.3f}")
    assert mixed[True] > mixed[False] + 0.1
    last = metrics_of(tmp_path / "out_True")[-1]
    assert last["curriculum/signal/drawn"] > last["curriculum/signal/all"]
