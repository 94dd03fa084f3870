"""Programming contests: problems with stdin/stdout or function tests (CodeContests, APPS, TACO, LiveCodeBench ...).

    python -m verl_like.kit.datasets.code_contests --local_dataset_path code_contests.json --local_save_dir OUT

A record has `problem` (or question, prompt, description) and `tests` (or test_cases, input_output): {"inputs",
"outputs"}, with "fn_name" where a function is called, or [{"input", "output"}, ...], also as JSON text. ground_truth
is the tests as JSON text, as verl has it, so that rows with different kinds of tests fit into one file.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from verl_like.kit.datasets import schema

_PROBLEM = ("problem", "question", "prompt", "description")
_TESTS = ("tests", "test_cases", "input_output")
_STDIN = (
    "Write a Python program that reads from standard input and writes the answer to standard output. Put the whole "
    "program into one block that begins with ```python and ends with ```."
)
_FUNCTION = (
    "Write a Python function `{name}` that solves it. Put the whole program into one block that begins with "
    "```python and ends with ```."
)


def tests_of(record: dict[str, Any], place: str) -> Any:
    """The tests as objects.

    Raises ValueError, naming the place, if there are none or inputs and outputs do not match.
    """
    value = next((record[name] for name in _TESTS if record.get(name)), None)
    try:
        tests = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: the tests are text but no JSON: {error}") from error
    if isinstance(tests, dict) and isinstance(tests.get("inputs"), list) and isinstance(tests.get("outputs"), list):
        if not tests["inputs"] or len(tests["inputs"]) != len(tests["outputs"]):
            raise ValueError(f"{place}: {len(tests['inputs'])} inputs for {len(tests['outputs'])} outputs")
        return tests
    if isinstance(tests, list) and tests and all(isinstance(t, dict) and {"input", "output"} <= set(t) for t in tests):
        return tests
    raise ValueError(f"{place}: no tests in {', '.join(_TESTS)} (it has: {', '.join(record)})")


def to_row(record: dict[str, Any], index: int, split: str, data_source: str) -> dict[str, Any]:
    """One problem as a row of the schema."""
    tests = tests_of(record, f"record {index}")
    problem = next((record[name] for name in _PROBLEM if record.get(name)), None)
    if problem is None:
        raise ValueError(f"record {index} has no {' or '.join(_PROBLEM)} (it has: {', '.join(record)})")
    name = tests.get("fn_name") if isinstance(tests, dict) else None
    instruction = _FUNCTION.format(name=name) if name else _STDIN
    return schema.make_row(
        data_source=data_source,
        prompt=f"{problem.strip()}\n\n{instruction}",
        ground_truth=json.dumps(tests, ensure_ascii=False),
        ability="code",
        split=split,
        index=index,
        num_tests=len(tests["inputs"]) if isinstance(tests, dict) else len(tests),
    )


def main(argv: list[str] | None = None) -> None:
    """Convert the splits that are there; a single file is divided."""
    local_source = "a file, or a folder with train and test files"
    arguments = schema.parser("Contest problems to parquet.", local_source=local_source, num_test=20)
    arguments.add_argument("--data_source", default="codecontests", help="data_source of the rows: it picks the grader")
    arguments.add_argument("--max_chars", type=int, default=1_000_000, help="leave out rows whose tests are longer")
    options = arguments.parse_args(argv)
    bounded = partial(_bounded, max_chars=options.max_chars)
    parts = schema.read_parts(options, "a file of problems with tests", prepare=bounded)
    row_of = partial(to_row, data_source=options.data_source)
    schema.write_splits(parts, row_of, options.local_save_dir, title=options.data_source)


def _bounded(records: list[dict[str, Any]], file: Path, *, max_chars: int) -> list[dict[str, Any]]:
    kept = [r for r in records if sum(len(json.dumps(r[name])) for name in _TESTS if name in r) <= max_chars]
    if len(kept) < len(records):
        print(f"{len(records) - len(kept)} of {len(records)} records have longer tests; left out", file=sys.stderr)
    return kept


if __name__ == "__main__":
    schema.run(main)
