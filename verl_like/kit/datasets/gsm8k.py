"""GSM8K: raw jsonl or parquet (question, answer) to train.parquet and test.parquet.

    python -m verl_like.kit.datasets.gsm8k --local_dataset_path raw/gsm8k --local_save_dir ~/data/gsm8k

The raw files are train.jsonl and test.jsonl of github.com/openai/grade-school-math (grade_school_math/data), or the
parquet files of openai/gsm8k on the hub (`verl-like data prepare gsm8k` downloads them). The instruction after each
question is verl's, so that models and scores compare.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from verl_like.kit.datasets import schema

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_ANSWER = re.compile(r"#### (-?[0-9.,]+)\s*$")


def final_answer(answer: str) -> str:
    """The number after ####, without thousands separators. Raises ValueError if there is none."""
    found = _ANSWER.search(answer)
    if found is None:
        raise ValueError(f"this answer does not end in `#### number`: {answer[-80:]!r}")
    return found.group(1).replace(",", "")


def to_row(record: dict[str, Any], index: int, split: str) -> dict[str, Any]:
    """One record {question, answer} as a row of the schema."""
    return schema.make_row(
        data_source="openai/gsm8k",
        prompt=f"{record['question']} {INSTRUCTION}",
        ground_truth=final_answer(record["answer"]),
        ability="math",
        split=split,
        index=index,
        answer=record["answer"],
        question=record["question"],
    )


def main(argv: list[str] | None = None) -> None:
    """Convert both splits."""
    arguments = schema.parser(
        "GSM8K jsonl to parquet.", local_source="folder with train.jsonl and test.jsonl (fields: question, answer)"
    )
    options = arguments.parse_args(argv)
    if options.local_dataset_path is None:
        raise ValueError(
            "--local_dataset_path is missing: download train.jsonl and test.jsonl from "
            "github.com/openai/grade-school-math (grade_school_math/data) and name their folder"
        )
    files = {split: _file_of(options.local_dataset_path, split) for split in ("train", "test")}
    parts = {split: schema.read_records(file, ("question", "answer")) for split, file in files.items()}
    schema.write_splits(parts, to_row, options.local_save_dir, title="gsm8k")


def _file_of(folder: Path, split: str) -> Path:
    """The jsonl file, or what the hub calls train-00000-of-00001.parquet where there is none."""
    jsonl = folder / f"{split}.jsonl"
    others = sorted(folder.glob(f"{split}*.parquet"))
    return others[0] if others and not jsonl.exists() else jsonl


if __name__ == "__main__":
    schema.run(main)
