"""What every preprocessing script shares: the row schema, the arguments, progress, and the report at the end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import track


def make_row(
    *,
    data_source: str,
    prompt: str | list[dict[str, Any]],
    ground_truth: Any,
    ability: str,
    split: str,
    index: int,
    **extra_info: Any,
) -> dict[str, Any]:
    """One row of verl's schema. A string prompt becomes one user message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra_info},
    }


def parser(description: str, *, local_source: str | None = None) -> argparse.ArgumentParser:
    """Arguments of every script. `local_source` describes --local_dataset_path, where the script reads one."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    if local_source is not None:
        arguments.add_argument("--local_dataset_path", type=Path, help=local_source)
    arguments.add_argument("--local_save_dir", type=Path, required=True, help="folder for the parquet files")
    return arguments


def read_jsonl(path: Path, required: Sequence[str]) -> list[dict[str, Any]]:
    """Records of a jsonl file. ValueError naming file, line and columns if one is broken or a column is missing."""
    records = []
    with require_file(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                records.append(_parse(line, f"{path}, line {number}", required))
    if not records:
        raise ValueError(f"{path} is empty")
    return records


def _parse(line: str, place: str, required: Sequence[str]) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error}") from error
    missing = [name for name in required if name not in record]
    if missing:
        raise ValueError(f"{place} has no {', '.join(missing)} (it has: {', '.join(record)})")
    return record


def require_file(path: Path) -> Path:
    """`path` with ~ expanded. ValueError if there is no such file, listing what lies there."""
    path = path.expanduser()
    if path.is_file():
        return path
    folder = path if path.is_dir() else path.parent
    found = sorted(entry.name for entry in folder.iterdir())[:10] if folder.is_dir() else []
    listing = f"{folder} holds: {', '.join(found) or 'nothing'}" if folder.is_dir() else f"there is no folder {folder}"
    raise ValueError(f"there is no file {path} ({listing})")


def convert(
    records: Sequence[Any], to_row: Callable[[Any, int], dict[str, Any]], *, title: str
) -> list[dict[str, Any]]:
    """Apply `to_row(record, index)` to all records, with a progress bar on stderr when it is a terminal."""
    numbered: Iterable[tuple[int, Any]] = enumerate(records)
    if sys.stderr.isatty():
        numbered = track(numbered, description=title, total=len(records))
    return [to_row(record, index) for index, record in numbered]


def write_rows(rows: list[dict[str, Any]], path: Path, *, show_sample: bool = True) -> None:
    """Write a parquet file, and print its row count and first row."""
    if not rows:
        raise ValueError(f"{path}: there are no rows to write")
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    print(f"{path}: {len(rows):,} rows")
    if show_sample:
        print("first row:", json.dumps(rows[0], indent=2, ensure_ascii=False), sep="\n")


def run(main: Callable[[list[str] | None], None]) -> None:
    """Entry point of a script: ValueErrors are shown as one line, without a traceback."""
    try:
        main(None)
    except ValueError as error:
        sys.exit(f"error: {error}")
