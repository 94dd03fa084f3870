"""Geometry3K: parquet files with problem, answer and images to train.parquet and test.parquet.

    python -m verl_like.kit.datasets.geometry3k --local_dataset_path raw/geo3k --local_save_dir ~/data/geometry3k

The raw files are those of hiyouga/geometry3k on the hub (`verl-like data prepare geometry3k` downloads them): a problem
holds one <image> for each of its images. The instruction is verl's, and so is the grader
(plugins/math_grading/geometry3k.py).
"""

from __future__ import annotations

from typing import Any

from verl_like.kit.datasets import schema

DATA_SOURCE = "hiyouga/geometry3k"
INSTRUCTION = (
    r"You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    r"The reasoning process MUST BE enclosed within <think> </think> tags. "
    r"The final answer MUST BE put in \boxed{}."
)


def to_row(record: dict[str, Any], index: int, split: str) -> dict[str, Any]:
    """One record {problem, answer, images} as a row of the schema.

    Raises ValueError for tags that are not its images.
    """
    problem, images = str(record["problem"]), record["images"] or []
    if problem.count("<image>") != len(images):
        raise ValueError(
            f"record {index} of {split}: {problem.count('<image>')} <image> tags, but {len(images)} images: is this "
            f"{DATA_SOURCE}?"
        )
    row = schema.make_row(
        data_source=DATA_SOURCE,
        prompt=f"{problem} {INSTRUCTION}",
        ground_truth=str(record["answer"]),
        ability="math",
        split=split,
        index=index,
        answer=str(record["answer"]),
        question=problem,
    )
    return row | {"images": images}


def main(argv: list[str] | None = None) -> None:
    """Convert the splits that are there."""
    arguments = schema.parser("Geometry3K to parquet.", local_source="a folder with train and test files, or one file")
    options = arguments.parse_args(argv)
    parts = schema.read_parts(options, f"{DATA_SOURCE} from the hub", ("problem", "answer", "images"))
    schema.write_splits(parts, to_row, options.local_save_dir, title="geometry3k")


if __name__ == "__main__":
    schema.run(main)
