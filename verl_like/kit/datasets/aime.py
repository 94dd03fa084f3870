"""AIME: competition problems with answers from 0 to 999, for validation: test.parquet.

    python -m verl_like.kit.datasets.aime --local_dataset_path aime_2024.jsonl --local_save_dir ~/data/aime2024

The source is a file in any format that data files may have, with the columns problem and answer (or Problem and
Answer, as some mirrors have it). The prompt is the one of DAPO's data (arXiv 2503.14476), which asks for a last line
`Answer: ...`, as the math_dapo grader reads it. Set rollout.val_kwargs.n for several answers to each problem.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from verl_like.kit.datasets import schema

PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
_COLUMNS = ("problem", "answer", "id", "year", "url")


def to_row(record: dict[str, Any], index: int, split: str, data_source: str) -> dict[str, Any]:
    """One record as a row of the schema. Raises ValueError unless the answer is a number of up to three digits."""
    fields = {name.lower(): value for name, value in record.items()}
    answer = str(fields["answer"]).strip()
    if not re.fullmatch(r"\d{1,3}(\.0)?", answer):
        raise ValueError(f"record {index}: an AIME answer is a whole number from 0 to 999, not {answer[:80]!r}")
    return schema.make_row(
        data_source=data_source,
        prompt=PROMPT.format(problem=fields["problem"]),
        ground_truth=str(int(float(answer))),  # "073" is 73
        ability="math",
        split=split,
        index=index,
        **{name: str(fields[name]) for name in _COLUMNS[2:] if fields.get(name) is not None},
    )


def main(argv: list[str] | None = None) -> None:
    """Write test.parquet."""
    arguments = schema.parser("AIME to parquet.", local_source="a file with the columns problem and answer")
    arguments.add_argument(
        "--data_source", default="aime2024", help="data_source of the rows: aime* is graded by math_dapo"
    )
    options = arguments.parse_args(argv)
    source = schema.required_source(options, "the problems of a year")
    records = schema.read_records(source)
    names = {name.lower() for record in records for name in record}
    missing = {"problem", "answer"} - names
    if missing:
        raise ValueError(f"{source} has no {', '.join(sorted(missing))} (it has: {', '.join(sorted(names))})")
    row_of = partial(to_row, data_source=options.data_source)
    schema.write_splits({"test": records}, row_of, options.local_save_dir, title=options.data_source)


if __name__ == "__main__":
    schema.run(main)
