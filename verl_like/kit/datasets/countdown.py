"""Countdown and game of 24: reach a target with given numbers, each used once.

    python -m verl_like.kit.datasets.countdown --local_save_dir ~/data/countdown                     # generated
    python -m verl_like.kit.datasets.countdown --local_dataset_path 24.csv --local_save_dir OUT      # game of 24
    python -m verl_like.kit.datasets.countdown --local_dataset_path others.parquet --local_save_dir OUT

The prompts are TinyZero's (github.com/Jiayi-Pan/TinyZero): `--template base` writes the conversation out for a base
model, `--template chat` asks plainly and leaves the form to the chat template. game24.csv is 24.csv of
github.com/princeton-nlp/tree-of-thought-llm. A parquet file must have the columns target and nums, or reward_model.
"""

from __future__ import annotations

import csv
import random
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from verl_like.kit.datasets import schema

_QUESTION = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And return the final "
    "answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
)
_TEMPLATES = {
    "chat": "{question}",
    "base": (
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
        "assistant first thinks about the reasoning process in the mind and then provides the user with the answer.\n"
        "User: {question}\nAssistant: Let me solve this step by step.\n<think>"
    ),
}


class Puzzle(NamedTuple):
    """Numbers in the order shown, and what to reach with them."""

    numbers: tuple[int, ...]
    target: int


def to_row(puzzle: Puzzle, index: int, split: str, *, template: str, data_source: str = "countdown") -> dict[str, Any]:
    """One puzzle as a row of the schema; ground_truth {"target", "numbers"}."""
    question = _QUESTION.format(numbers=list(puzzle.numbers), target=puzzle.target)
    return schema.make_row(
        data_source=data_source,
        prompt=_TEMPLATES[template].format(question=question),
        ground_truth={"target": puzzle.target, "numbers": list(puzzle.numbers)},
        ability="math",
        split=split,
        index=index,
    )


def generate(count: int, *, num_operands: int, max_number: int, max_target: int, seed: int) -> list[Puzzle]:
    """Generate `count` different solvable puzzles. Raises ValueError if so many are not found."""
    generator, seen, puzzles = random.Random(seed), set(), []
    for _ in range(200 * count):
        if len(puzzles) == count:
            break
        numbers = tuple(generator.randint(1, max_number) for _ in range(num_operands))
        target = _random_result(list(numbers), generator)
        key = (tuple(sorted(numbers)), target)
        if target is not None and 0 < target <= max_target and key not in seen:
            seen.add(key)
            puzzles.append(Puzzle(numbers, target))
    if len(puzzles) < count:
        raise ValueError(
            f"only {len(puzzles)} of {count} different puzzles found; raise --max_number or --num_operands"
        )
    return puzzles


def _random_result(numbers: list[int], generator: random.Random) -> int | None:
    """Join random pairs by random operations until one number is left; None when a division does not come out."""
    while len(numbers) > 1:
        a = numbers.pop(generator.randrange(len(numbers)))
        b = numbers.pop(generator.randrange(len(numbers)))
        operation = generator.choice("+-*/")
        if operation == "/":
            if b == 0 or a % b:
                return None
            numbers.append(a // b)
        else:
            numbers.append({"+": a + b, "-": a - b, "*": a * b}[operation])
    return numbers[0]


def read_game24(path: Path) -> list[Puzzle]:
    """Puzzles of 24.csv, in its order: easy ones first."""
    with schema.require_file(path).open(newline="") as file:
        reader = csv.DictReader(file)
        if "Puzzles" not in (reader.fieldnames or []):
            raise ValueError(f"{path} has no column Puzzles (it has: {', '.join(reader.fieldnames or [])})")
        return [Puzzle(tuple(int(number) for number in record["Puzzles"].split()), 24) for record in reader]


def read_parquet(path: Path) -> list[Puzzle]:
    """Puzzles of a parquet file that others wrote: columns target and nums, or reward_model.ground_truth."""
    table = pq.read_table(schema.require_file(path))
    if {"target", "nums"} <= set(table.column_names):
        records = table.select(["target", "nums"]).to_pylist()
        return [Puzzle(tuple(record["nums"]), record["target"]) for record in records]
    if "reward_model" in table.column_names:
        truths = [value["ground_truth"] for value in table.column("reward_model").to_pylist()]
        return [Puzzle(tuple(truth["numbers"]), truth["target"]) for truth in truths]
    raise ValueError(f"{path} has neither target and nums nor reward_model (it has: {', '.join(table.column_names)})")


def load(options: Any) -> tuple[list[Puzzle], str]:
    """The different puzzles that the options ask for, in random order, and their data source."""
    source: Path | None = options.local_dataset_path
    total = options.num_train + options.num_test
    if source is None:
        sizes = {name: getattr(options, name) for name in ("num_operands", "max_number", "max_target")}
        return generate(total, **sizes, seed=options.seed), "countdown"
    if source.suffix == ".csv":
        puzzles, name = read_game24(source), "game24"
    elif source.suffix == ".parquet":
        puzzles, name = read_parquet(source), "countdown"
    else:
        raise ValueError(f"--local_dataset_path {source}: expected a .csv (game of 24) or .parquet file")
    puzzles = list({(tuple(sorted(puzzle.numbers)), puzzle.target): puzzle for puzzle in puzzles}.values())
    random.Random(options.seed).shuffle(puzzles)
    if options.num_test >= len(puzzles):
        raise ValueError(f"--num_test {options.num_test} leaves nothing of the {len(puzzles)} puzzles in {source}")
    return puzzles[:total], name


def main(argv: list[str] | None = None) -> None:
    """Write train.parquet and test.parquet; no puzzle is in both."""
    arguments = schema.parser(
        "Countdown puzzles to parquet.", local_source="24.csv or a parquet file; without it puzzles are generated"
    )
    arguments.add_argument("--num_train", type=int, default=8000, help="training rows (at most, when reading a file)")
    arguments.add_argument("--num_test", type=int, default=200, help="test rows")
    arguments.add_argument("--num_operands", type=int, default=3, help="numbers per generated puzzle")
    arguments.add_argument("--max_number", type=int, default=99, help="largest number of a generated puzzle")
    arguments.add_argument("--max_target", type=int, default=100, help="largest target of a generated puzzle")
    arguments.add_argument("--template", choices=sorted(_TEMPLATES), default="chat", help="form of the prompt")
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args(argv)
    puzzles, data_source = load(options)
    parts = {"train": puzzles[options.num_test :], "test": puzzles[: options.num_test]}
    row_of = partial(to_row, template=options.template, data_source=data_source)
    schema.write_splits(parts, row_of, options.local_save_dir, title=data_source)


if __name__ == "__main__":
    schema.run(main)
