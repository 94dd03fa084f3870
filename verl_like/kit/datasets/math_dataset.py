"""MATH: problems with a final answer or a worked solution to train.parquet and test.parquet.

    python -m verl_like.kit.datasets.math_dataset --local_dataset_path math_train.json --local_save_dir ~/data/math

The source is a file, or a folder with train and test files (github.com/hendrycks/math, or a mirror of it), in any
format that data files may have. A record has `problem`, and `answer` or a `solution` whose last \\boxed{} holds the
answer. The instruction and the data source are verl's, so that models and scores compare.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from verl_like.kit.datasets import schema

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
_KEPT = ("level", "difficulty", "type", "subject", "solution", "unique_id")


def last_boxed(solution: str) -> str | None:
    """Return the content of the last \\boxed{...} or \\fbox{...}, braces balanced; None if none is there or closed."""
    start = max(solution.rfind("\\boxed{"), solution.rfind("\\fbox{"))
    if start < 0:
        return None
    start = solution.index("{", start) + 1
    depth = 1
    for end in range(start, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[end], 0)
        if depth == 0:
            return solution[start:end]
    return None


def answer_of(record: dict[str, Any]) -> str | None:
    """The final answer of a record, None if it has none."""
    answer = record.get("answer")
    if answer is None and record.get("solution") is not None:
        return last_boxed(str(record["solution"]))
    return None if answer is None else str(answer)


def to_row(record: dict[str, Any], index: int, split: str, data_source: str = DATA_SOURCE) -> dict[str, Any]:
    """One record {problem, answer or solution, ...} as a row of the schema."""
    return schema.make_row(
        data_source=data_source,
        prompt=f"{record['problem']} {INSTRUCTION}",
        ground_truth=answer_of(record),
        ability="math",
        split=split,
        index=index,
        **{name: record[name] for name in _KEPT if record.get(name) is not None},
    )


def main(argv: list[str] | None = None) -> None:
    """Convert all splits that are there; a single file is divided."""
    local_source = "a file, or a folder with train and test files"
    arguments = schema.parser("MATH to parquet.", local_source=local_source, num_test=500)
    arguments.add_argument("--data_source", default=DATA_SOURCE, help="data_source of the rows: it picks the grader")
    options = arguments.parse_args(argv)
    parts = schema.read_parts(options, "MATH, from github.com/hendrycks/math for instance", ("problem",), _answered)
    row_of = partial(to_row, data_source=options.data_source)
    schema.write_splits(parts, row_of, options.local_save_dir, title="math")


def _answered(records: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    kept = [record for record in records if answer_of(record)]
    if len(kept) < len(records):
        print(f"{len(records) - len(kept)} of {len(records)} records have no answer and are left out", file=sys.stderr)
    return kept


if __name__ == "__main__":
    schema.run(main)
