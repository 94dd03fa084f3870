"""The sources of the mixed run, each with its own preprocessing script; what is there already is kept.

    python recipes/mixed/prepare.py --source ../shared/data --output-dir outputs/mixed/data

Writes gsm8k, math, countdown (generated) and code with train.parquet and test.parquet, and humaneval with test.parquet.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_like.kit.datasets import code_contests, countdown, gsm8k, humaneval, math_dataset, schema


def prepare(source: Path, output: Path) -> None:
    """Run each script whose output is missing. ValueError names a raw file that is not there."""
    runs = {
        "gsm8k": (gsm8k.main, ["--local_dataset_path", str(source / "gsm8k")]),
        "math": (math_dataset.main, ["--local_dataset_path", str(source / "math" / "math_train.json")]),
        "countdown": (countdown.main, ["--num_train", "2000", "--num_test", "100"]),
        "code": (code_contests.main, ["--local_dataset_path", str(source / "code_stdio" / "code_contests.json")]),
        "humaneval": (humaneval.main, ["--local_dataset_path", str(source / "humaneval" / "HumanEval.jsonl.gz")]),
    }
    for name, (main, arguments) in runs.items():
        if not (output / name / "test.parquet").is_file():
            main([*arguments, "--local_save_dir", str(output / name)])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="folder with gsm8k/, math/, code_stdio/, humaneval/")
    parser.add_argument("--output-dir", type=Path, required=True)
    options = parser.parse_args(argv)
    prepare(options.source, options.output_dir)


if __name__ == "__main__":
    schema.run(main)
