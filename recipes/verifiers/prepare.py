"""Rows for play.py out of an environment of verifiers.

    python recipes/verifiers/prepare.py wordle --out outputs/wordle --arguments '{"num_train_examples": 500}'

Run it where verifiers and the environment are installed. Writes train.parquet and, where the environment has examples
for evaluation, val.parquet.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import verifiers as vf


def row(name: str, arguments: str, example: dict[str, Any]) -> dict[str, Any]:
    """One example as verl's row. Graders are never asked: the program's reward is the score."""
    kept = {key: value for key, value in example.items() if value is not None}
    return {
        "data_source": f"verifiers/{name}",
        "prompt": [{"role": said["role"], "content": str(said["content"])} for said in example["prompt"]],
        "reward_model": {"style": "rule", "ground_truth": str(example.get("answer") or "")},
        "extra_info": {"verifiers": {"name": name, "arguments": arguments, "example": json.dumps(kept, default=str)}},
    }


def write(name: str, arguments: str, out: Path, count: int = -1) -> list[Path]:
    """The files that were written."""
    loaded, written = vf.load_environment(name, **json.loads(arguments)), []
    sources = {"train": loaded.get_dataset}
    if loaded.build_eval_dataset() is not None:
        sources["val"] = loaded.get_eval_dataset
    out.mkdir(parents=True, exist_ok=True)
    for split, source in sources.items():
        path = out / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist([row(name, arguments, each) for each in source(n=count)]), path)
        written.append(path)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="as vf.load_environment takes it")
    parser.add_argument("--arguments", default="{}", help="its arguments, JSON")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=-1, help="at most so many examples of each; -1: all")
    options = parser.parse_args()
    try:
        written = write(options.name, options.arguments, options.out, options.count)
    except json.JSONDecodeError as error:
        parser.error(f"--arguments={options.arguments}: no JSON ({error}); write '{{\"name\": value}}'")
    except (ValueError, OSError) as error:  # no such environment; what its own code raises keeps its traceback
        parser.error(str(error))
    for path in written:
        print(f"{path}: {pq.read_metadata(path).num_rows} rows")


if __name__ == "__main__":
    main()
