"""Warm starts of the recipes: a supervised run (`verl-like sft`) of a new model on what a teacher shows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import verl_like


def supervised(
    model: Path, rows: list[dict[str, Any]], folder: Path, *, steps: int, batch_size: int, seed: int, **more: Any
) -> Path:
    """Train a model on rows, in this process: 20 steps of warm-up, cosine decay to zero. Returns the trained folder.

    Args:
        model: its Hugging Face folder.
        rows: of `verl-like sft`, gone through as often as `steps` asks for, each time in another order.
        folder: of the run, written anew; the rows are in rows.parquet.
        steps: optimizer steps.
        batch_size: rows of a step.
        seed: of the run.
        more: further keys, with two underscores for a dot (optim__lr).
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=100)
    settings = {
        "trainer.objective": "sft",
        "data.train_files": str(folder / "rows.parquet"),
        "data.train_batch_size": batch_size,
        "data.seed": seed,
        "model.path": str(model),
        "model.enable_gradient_checkpointing": False,
        "optim.weight_decay": 0.0,
        "optim.lr_warmup_steps": 20,
        "checkpoint.save_contents": ["hf_model"],
        "trainer.total_training_steps": steps,
        "trainer.device": "cpu",
        "trainer.launcher": "local",
        "trainer.seed": seed,
        "trainer.report_freq": -1,
        "trainer.default_local_dir": str(folder),
    }
    verl_like.run(verl_like.compose(settings | {name.replace("__", "."): value for name, value in more.items()}))
    return folder / f"global_step_{steps}" / "actor" / "huggingface"
