"""Parts that every preprocessing script shares: the row schema, the arguments, progress, and the report at the end."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import track

from verl_like.data.rows import READERS, file_format, read_rows

_IMAGE_ROWS = 100  # in a row group: what is read to open one image


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


def parser(
    description: str, *, local_source: str | None = None, num_test: int | None = None
) -> argparse.ArgumentParser:
    """Arguments of every script. `local_source` describes --local_dataset_path, where the script reads one. num_test:
    the default of --num_test, where a single file is divided."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    if local_source is not None:
        arguments.add_argument("--local_dataset_path", type=Path, help=local_source)
    arguments.add_argument(
        "--local_save_dir", "--local_dir", type=Path, required=True, help="folder for the parquet files"
    )
    if num_test is not None:
        held_out = "rows held out of a single file for test.parquet"
        arguments.add_argument("--num_test", type=int, default=num_test, help=held_out)
        arguments.add_argument("--seed", type=int, default=1, help="which rows are held out")
    return arguments


def read_records(path: Path, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All rows of a file in any format of `data.rows`. Raises ValueError if it is empty or a row lacks a column."""
    rows = read_rows(require_file(path))
    if not len(rows):
        raise ValueError(f"{path} is empty")
    records = [rows.row(position) for position in range(len(rows))]
    for number, record in enumerate(records):
        if missing := [name for name in required if name not in record]:
            raise ValueError(f"{path}, row {number} has no {', '.join(missing)} (it has: {', '.join(record)})")
    return records


def required_source(options: Any, where: str) -> Path:
    """Return --local_dataset_path. Raises ValueError, which says where to download it from, if it is missing."""
    if options.local_dataset_path is None:
        raise ValueError(f"--local_dataset_path is missing: download {where}, and name it")
    return options.local_dataset_path.expanduser()


def find_splits(source: Path, splits: Sequence[str] = ("train", "test")) -> dict[str, Path]:
    """Split -> file: a single file is the first split; in a folder the files whose names begin with a split's name."""
    if not source.is_dir():
        return {splits[0]: require_file(source)}
    found: dict[str, Path] = {}
    for split in splits:
        files = sorted(
            path for path in source.iterdir() if path.name.startswith(split) and file_format(path) in READERS
        )
        if len(files) > 1:
            raise ValueError(f"{source} has several {split} files ({', '.join(f.name for f in files)}); name one file")
        if files:
            found[split] = files[0]
    if not found:
        listing = ", ".join(sorted(path.name for path in source.iterdir())[:10]) or "nothing"
        raise ValueError(f"{source} has no file that begins with {' or '.join(splits)} (it holds: {listing})")
    return found


def read_parts(
    options: Any,
    where: str,
    required: Sequence[str] = (),
    prepare: Callable[[list[dict[str, Any]], Path], list[Any]] = lambda records, _: records,
) -> dict[str, list[Any]]:
    """Read each split of --local_dataset_path with `prepare`; a single file is divided if the script has --num_test.

    where: address to download the data from, for the error message.
    required: columns that each record must have.
    prepare: makes rows of (records, file).
    """
    source = required_source(options, where)
    parts = {split: prepare(read_records(path, required), path) for split, path in find_splits(source).items()}
    is_divided = "num_test" in options and not source.is_dir()
    return hold_out(parts["train"], options.num_test, options.seed) if is_divided else parts


def hold_out(records: Sequence[Any], num_test: int, seed: int) -> dict[str, list[Any]]:
    """Split records into "train" and "test": `num_test` random ones for the test, all in their old order."""
    if not 0 <= num_test < len(records):
        raise ValueError(f"--num_test {num_test} leaves nothing of the {len(records)} records")
    chosen = set(random.Random(seed).sample(range(len(records)), num_test))
    parts = {"train": [r for i, r in enumerate(records) if i not in chosen]}
    return parts | ({"test": [records[i] for i in sorted(chosen)]} if num_test else {})


def write_splits(
    parts: Mapping[str, Sequence[Any]], to_row: Callable[[Any, int, str], dict[str, Any]], folder: Path, *, title: str
) -> None:
    """Convert each split's records with `to_row(record, index, split)` into `folder`/<split>.parquet, with a progress
    bar on stderr when it is a terminal."""
    for number, (split, records) in enumerate(parts.items()):
        numbered: Iterable[tuple[int, Any]] = enumerate(records)
        if sys.stderr.isatty():
            numbered = track(numbered, description=f"{title} {split}", total=len(records))
        rows = [to_row(record, index, split) for index, record in numbered]
        write_rows(rows, folder / f"{split}.parquet", show_sample=number == 0)


def require_file(path: Path) -> Path:
    """Expand ~ in `path`. Raises ValueError, which lists what lies there, if there is no such file."""
    path = path.expanduser()
    if path.is_file():
        return path
    folder = path if path.is_dir() else path.parent
    found = sorted(entry.name for entry in folder.iterdir())[:10] if folder.is_dir() else []
    listing = f"{folder} holds: {', '.join(found) or 'nothing'}" if folder.is_dir() else f"there is no folder {folder}"
    raise ValueError(f"there is no file {path} ({listing})")


def write_rows(rows: list[dict[str, Any]], path: Path, *, show_sample: bool = True) -> None:
    """Write a parquet file, and print its row count and first row."""
    if not rows:
        raise ValueError(f"{path}: there are no rows to write")
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    try:
        table = pa.table({name: [row.get(name) for row in rows] for name in columns})
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(
            f"{path}: a column holds values of different types ({error}); write them as JSON text"
        ) from error
    partial = path.with_name(f".{path.name}.part")  # scripts take a file that is there for whole
    pq.write_table(table, partial, row_group_size=_IMAGE_ROWS if "images" in columns else None)
    partial.replace(path)
    print(f"{path}: {len(rows):,} rows")
    if show_sample:
        text = json.dumps(rows[0], indent=2, ensure_ascii=False, default=lambda data: f"<{len(data):,} bytes>")
        print("first row:", _shortened(text), sep="\n")


def _shortened(text: str, limit: int = 4000) -> str:
    """Shorten a row for the screen, which megabytes of test cases would fill."""
    return text if len(text) <= limit else f"{text[:limit]}\n... ({len(text):,} characters)"


def run(main: Callable[[list[str] | None], None]) -> None:
    """Entry point of a script: ValueErrors, and files that cannot be read or written, are shown as one line, without a
    traceback."""
    try:
        main(None)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
