"""HumanEval and MBPP: Python functions with assert tests.

    python -m verl_like.kit.datasets.humaneval --local_dataset_path HumanEval.jsonl.gz --local_save_dir OUT
    python -m verl_like.kit.datasets.humaneval --local_dataset_path mbpp.jsonl --local_save_dir OUT

HumanEval.jsonl.gz is that of github.com/openai/human-eval and gives test.parquet; mbpp.jsonl that of
github.com/google-research/google-research/tree/master/mbpp, whose task ids say the split: test 11 to 510, train 601
to 974 (few-shot prompts and validation are left out). Which of the two a file is follows from its columns. ground_truth
holds the tests in the data set's own form, which the code grader reads; extra_info.reference_solution is a program
that passes.
"""

from __future__ import annotations

from typing import Any

from verl_like.kit.datasets import schema

_INSTRUCTION = "Put the whole program into one block that begins with ```python and ends with ```."
_MBPP_SPLITS = {"train": range(601, 975), "test": range(11, 511)}


def humaneval_row(record: dict[str, Any], index: int, split: str) -> dict[str, Any]:
    """Convert a record {task_id, prompt, entry_point, canonical_solution, test} to a row."""
    return schema.make_row(
        data_source="openai/openai_humaneval",
        prompt=f"Complete this Python function.\n\n```python\n{record['prompt'].strip()}\n```\n\n{_INSTRUCTION}",
        ground_truth={name: record[name] for name in ("prompt", "entry_point", "test")},
        ability="code",
        split=split,
        index=index,
        task_id=record["task_id"],
        reference_solution=record["prompt"] + record["canonical_solution"],
    )


def mbpp_row(record: dict[str, Any], index: int, split: str) -> dict[str, Any]:
    """Convert a record {task_id, text or prompt, code, test_list, test_setup_code or test_imports} to a row."""
    setup = record.get("test_setup_code") or "\n".join(record.get("test_imports") or [])
    tests = "\n".join(record["test_list"])
    question = record["text"] if record.get("text") else record["prompt"]
    return schema.make_row(
        data_source="google-research-datasets/mbpp",
        prompt=f"{question}\n\nYour function must pass these tests:\n\n```python\n{tests}\n```\n\n{_INSTRUCTION}",
        ground_truth={"test_list": record["test_list"], "test_setup_code": setup},
        ability="code",
        split=split,
        index=index,
        task_id=str(record["task_id"]),
        reference_solution=record["code"],
    )


def main(argv: list[str] | None = None) -> None:
    """Write the splits that the source has."""
    arguments = schema.parser("HumanEval or MBPP to parquet.", local_source="HumanEval.jsonl.gz or mbpp.jsonl")
    options = arguments.parse_args(argv)
    source = schema.required_source(options, "HumanEval.jsonl.gz from github.com/openai/human-eval (data)")
    records = schema.read_records(source, ("task_id",))
    if "canonical_solution" in records[0]:
        records = schema.read_records(source, ("prompt", "entry_point", "test"))
        schema.write_splits({"test": records}, humaneval_row, options.local_save_dir, title="humaneval")
        return
    records = schema.read_records(source, ("test_list", "code"))
    parts = {split: [r for r in records if int(r["task_id"]) in ids] for split, ids in _MBPP_SPLITS.items()}
    parts = {split: part for split, part in parts.items() if part}
    if not parts:
        raise ValueError(f"{source}: no task_id from 11 to 510 (test) or 601 to 974 (train)")
    schema.write_splits(parts, mbpp_row, options.local_save_dir, title="mbpp")


if __name__ == "__main__":
    schema.run(main)
