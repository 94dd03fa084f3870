"""Four sources in four formats, mixed by weight, through the whole loop with their built-in graders."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from support import metrics_of, overrides

from verl_like.kit.datasets import code_contests, countdown, gsm8k, math_dataset
from verl_like.trainer.compose import compose
from verl_like.trainer.run import run as train

WEIGHTS = {"openai/gsm8k": 4, "DigitalLearningGmbH/MATH-lighteval": 2, "countdown": 1, "codecontests": 1}


def write_sources(folder: Path) -> dict[str, str]:
    """gsm8k.parquet, math.jsonl, countdown.json and code.csv with rows as the preprocessing scripts make them."""
    tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
    puzzles = countdown.generate(8, num_operands=3, max_number=9, max_target=50, seed=1)
    sums = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(16)]
    squares = [{"problem": f"{i}^2?", "answer": str(i * i)} for i in range(12)]
    tasks = [{"problem": f"Add {i}", "tests": tests} for i in range(8)]
    rows = {
        "gsm8k.parquet": [gsm8k.to_row(record, i, "train") for i, record in enumerate(sums)],
        "math.jsonl": [math_dataset.to_row(record, i, "train") for i, record in enumerate(squares)],
        "countdown.json": [countdown.to_row(p, i, split="train", template="chat") for i, p in enumerate(puzzles)],
        "code.csv": [code_contests.to_row(task, i, "train", "codecontests") for i, task in enumerate(tasks)],
    }
    pq.write_table(pa.Table.from_pylist(rows["gsm8k.parquet"]), folder / "gsm8k.parquet")
    (folder / "math.jsonl").write_text("\n".join(json.dumps(row) for row in rows["math.jsonl"]))
    (folder / "countdown.json").write_text(json.dumps(rows["countdown.json"]))
    with (folder / "code.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows["code.csv"][0]))
        writer.writeheader()
        for row in rows["code.csv"]:
            writer.writerow({name: v if isinstance(v, str) else json.dumps(v) for name, v in row.items()})
    return {name.split(".")[0]: str(folder / name) for name in rows}


def run(files: dict[str, str], model: Path, out: Path, **settings: Any) -> list[dict[str, float]]:
    task = {
        "data.train_files": f"[{','.join(files.values())}]",
        "data.val_files": f"{{sums: {files['gsm8k']}, mixed: [{files['math']},{files['code']}]}}",
        "data.domain_weights": "{" + ",".join(f"{name}: {weight}" for name, weight in WEIGHTS.items()) + "}",
        "data.truncation": "left",
        "data.val_max_samples": 4,
        "trainer.validation_data_dir": str(out / "validation"),
        "trainer.rollout_data_dir": str(out / "rollouts"),
    }
    train(compose(overrides(task, model, out, **{"actor_rollout_ref.rollout.n": 2}, **settings)))
    return metrics_of(out)


def test_four_sources_mix_by_weight_validate_apart_and_resume(tmp_path: Path, tiny_model: Path) -> None:
    files = write_sources(tmp_path)
    settings = {"trainer.save_freq": 2, "trainer.test_freq": 4, "trainer.total_training_steps": 4}
    schedule = {"actor_rollout_ref.actor.optim.total_training_steps": 4}
    whole = run(files, tiny_model, tmp_path / "whole", **settings, **schedule)
    for record in whole:
        assert {name: record[f"domain/{name}/num_prompts"] for name in WEIGHTS} == WEIGHTS
        assert all(record[f"domain/{name}/reward_failures"] == 0 for name in WEIGHTS)
    run(files, tiny_model, tmp_path / "parts", **{**settings, "trainer.total_training_steps": 2}, **schedule)
    parts = run(files, tiny_model, tmp_path / "parts", **settings, **schedule)
    assert len(parts) == 4
    for step in range(1, 5):  # the same prompts in the same order, with the same answers
        first, second = (
            (tmp_path / name / "rollouts" / f"{step:06d}.jsonl").read_text() for name in ("whole", "parts")
        )
        assert first == second
    assert len({(tmp_path / "whole" / "rollouts" / f"{step:06d}.jsonl").read_text() for step in range(1, 5)}) == 4

    names = {name.split("/mean@")[0] for name in whole[3] if name.startswith("val-core/")}
    assert names == {
        "val-core/sums/reward",
        "val-core/mixed/DigitalLearningGmbH/MATH-lighteval/acc",
        "val-core/mixed/codecontests/acc",
    }
    folder = tmp_path / "whole" / "validation"
    sizes = {str(p.relative_to(folder)): len(p.read_text().splitlines()) for p in folder.rglob("*.jsonl")}
    assert sizes["000004.jsonl"] == 8 and sizes["sums/000004.jsonl"] == 4
    samples = [json.loads(line) for line in (folder / "000004.jsonl").read_text().splitlines()]
    assert {sample["validation_set"] for sample in samples} == {"sums", "mixed"}
