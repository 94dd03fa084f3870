"""Arithmetic, generated: prompts such as "37+58=" with the answer "95".

    python -m verl_like.kit.datasets.arithmetic --local_save_dir ~/data/arithmetic --max_operand 99

No pair of operands, in either order, is in both splits: validation measures what was learned, not what was memorised.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from verl_like.kit.datasets import schema

DATA_SOURCE = "arithmetic"
_OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}

Pair = tuple[int, int]


def split_pairs(num_train: int, num_val: int, max_operand: int, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Distinct ordered operand pairs of 0 to max_operand for training and validation, no pair in both in any order."""
    generator = random.Random(seed)
    unordered = [(a, b) for a in range(max_operand + 1) for b in range(a, max_operand + 1)]
    generator.shuffle(unordered)
    if num_val >= len(unordered):
        raise ValueError(f"num_val={num_val} needs more than {len(unordered)} operand pairs; raise max_operand")
    val = [(a, b) if generator.random() < 0.5 else (b, a) for a, b in unordered[:num_val]]
    rest = unordered[num_val:]
    train = [*rest, *((b, a) for a, b in rest if a != b)]
    if num_train > len(train):
        raise ValueError(
            f"num_train={num_train} is more than the {len(train)} pairs that max_operand={max_operand} leaves beside "
            f"num_val={num_val}; lower num_train or raise max_operand"
        )
    generator.shuffle(train)
    return train[:num_train], val


def to_row(pair: Pair, index: int, split: str, operation: str = "+") -> dict[str, Any]:
    """The row that asks for `a operation b`."""
    a, b = pair
    return schema.make_row(
        data_source=DATA_SOURCE,
        prompt=f"{a}{operation}{b}=",
        ground_truth=str(_OPERATIONS[operation](a, b)),
        ability="math",
        split=split,
        index=index,
    )


def main(argv: list[str] | None = None) -> None:
    """Generate train.parquet and val.parquet."""
    arguments = schema.parser("Generate arithmetic problems.")
    arguments.add_argument("--num_train", type=int, default=4000, help="training rows")
    arguments.add_argument("--num_val", type=int, default=500, help="validation rows")
    arguments.add_argument("--max_operand", type=int, default=99, help="largest operand; the smallest is 0")
    arguments.add_argument("--operation", choices=sorted(_OPERATIONS), default="+")
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args(argv)
    train, val = split_pairs(options.num_train, options.num_val, options.max_operand, options.seed)
    row_of = partial(to_row, operation=options.operation)
    schema.write_splits({"train": train, "val": val}, row_of, options.local_save_dir, title="arithmetic")


if __name__ == "__main__":
    schema.run(main)
