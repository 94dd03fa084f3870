"""Every file format gives the same rows, and what is wrong with a file is named with its place."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_like.data.rows import read_rows

ROWS = [
    {
        "data_source": "s",
        "prompt": [{"role": "user", "content": f"é {i}"}],
        "reward_model": {"style": "rule", "ground_truth": f"0{i}"},
        "extra_info": {"index": i, "names": ["a", "b"]},
    }
    for i in range(3)
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """`rows` in the format that the name asks for."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    if name.endswith((".arrow", ".feather", ".ipc")):
        table = pa.Table.from_pylist(rows)
        new = pa.ipc.new_stream if name.startswith("stream") else pa.ipc.new_file
        with new(str(path), table.schema) as sink:
            sink.write_table(table)
        return path
    if name.endswith((".csv", ".tsv")):
        cells = [{k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows]
        with (path.parent / "plain").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if name.endswith(".tsv") else ",")
            writer.writeheader()
            writer.writerows(cells)
        text = (path.parent / "plain").read_bytes()
    else:
        lines = "\n".join(json.dumps(row) for row in rows) + "\n\n"
        text = (lines if name.endswith(("jsonl", "ndjson")) else json.dumps(rows)).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return path


def whole_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue().to_pybytes()


FORMATS = ["a.parquet", "a.arrow", "stream.arrow", "a.feather", "a.ipc", "a.json", "a.jsonl", "a.ndjson", "a.csv"]
FORMATS += ["a.tsv", "a.json.gz", "a.jsonl.gz", "a.csv.gz"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    rows = read_rows(write(tmp_path / name, ROWS))
    assert len(rows) == 3
    assert rows.columns == list(ROWS[0])
    assert [rows.row(i) for i in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]
    assert rows.column("data_source") == ["s"] * 3
    assert rows.subcolumn("reward_model", "ground_truth") == ["00", "01", "02"]  # a number in text stays text
    assert rows.subcolumn("reward_model", "absent") == [None] * 3
    assert rows.counts("data_source") == [1, 1, 1]
    assert name.endswith((".csv", ".tsv", ".csv.gz")) or rows.counts("prompt") == [1, 1, 1]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_tables_leave_out_columns_that_nobody_wants_but_know_them(tmp_path: Path, name: str) -> None:
    rows = read_rows(write(tmp_path / name, ROWS), {"prompt"})
    assert rows.row(0) == {"prompt": ROWS[0]["prompt"]}
    assert rows.columns == list(ROWS[0])


def test_rows_of_json_may_differ_in_columns_and_types(tmp_path: Path) -> None:
    mixed = [{"prompt": "a", "reward_model": {"ground_truth": "1"}}, {"prompt": [{"role": "user", "content": "b"}]}]
    mixed.append({"prompt": "c", "reward_model": {"ground_truth": {"inputs": ["1"]}}, "level": 3})
    for name in ("a.json", "a.jsonl"):
        rows = read_rows(write(tmp_path / name, mixed))
        assert [rows.row(i) for i in range(3)] == mixed
        assert rows.columns == ["prompt", "reward_model", "level"]
        assert rows.column("level") == [None, None, 3]


def test_a_byte_order_mark_is_not_part_of_the_first_name(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json", "a.csv"):
        path = write(tmp_path / name, ROWS)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert read_rows(path).row(0) == ROWS[0]


def test_json_files_with_other_layouts(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in (json.dumps({"data": ROWS}), "\n".join(json.dumps(row) for row in ROWS)):
        path.write_text(text)
        assert [read_rows(path).row(i) for i in range(3)] == ROWS


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.json", "a.jsonl", "a.csv"])
def test_a_row_of_many_megabytes(tmp_path: Path, name: str) -> None:
    huge = {"data_source": "s", "prompt": "x", "extra_info": {"tests": "y" * 5_000_000}}
    rows = read_rows(write(tmp_path / name, [huge, huge]))
    assert rows.row(1) == huge


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv"])
def test_empty_text_files_have_no_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    assert len(read_rows(tmp_path / name)) == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n\n{"a": 1,\n', r"a\.jsonl, line 3 is not JSON.*begins b'\{\"a\": 1,'"),
        ("a.jsonl", b"[1]\n", r"line 1 must be a JSON object"),
        ("a.jsonl", b'{"a": "\xff"}\n', r"line 1 is not JSON"),
        ("a.json", b'[\n{"a": 1},\n{]', r"a\.json, line 3 is not JSON"),
        ("a.json", b"[1]", r"row 0 must be a JSON object"),
        ("a.json", b"3", r"must hold a list"),
        ("a.json", b'"\xff"', r"is not UTF-8"),
        ("a.csv", b"a,b\n1,2\n3\n", r"line 3 has 1 cells, but the header names 2: a, b"),
        ("a.csv", b'a,b\n1,"2\n', r"is not a csv file"),
        ("a.csv", b"a\n\xff\n", r"is not UTF-8"),
        ("a.csv", b"prompt,reward_model\nx,{1\n", r"line 2, column 'reward_model' must hold JSON"),
        ("a.csv.gz", b"a,b\n", r"is not a gzip file"),
        ("a.csv.gz", gzip.compress(b"a,b\n" * 99, mtime=0)[:20], r"a\.csv\.gz is not a gzip file"),
        ("a.csv.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20, r"a\.csv\.gz is not a gzip file"),
        ("a.arrow", b"", r"a\.arrow is not an arrow file"),
        ("a.parquet", whole_parquet()[:-9], r"a\.parquet is not a parquet file"),
        ("a.parquet", b"PAR1" + whole_parquet()[40:], r"a\.parquet is not a parquet file"),
        ("a.arrow", b"nothing", r"is not an arrow file"),
        ("a.parquet", b"nothing", r"is not a parquet file"),
        ("a.xlsx", b"", r"\.xlsx is no known format; choose from \.parquet, \.json"),
        ("a", b"", r"a file without ending is no known format"),
    ],
)
def test_broken_files_name_file_and_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / name)


def test_text_that_looks_like_a_list_stays_text_in_csv(tmp_path: Path) -> None:
    prompts = ['[{"a": 1}] what is this?', "[1, 2] sorted?", '[{"x": 1}]']
    rows = read_rows(write(tmp_path / "a.csv", [{"prompt": prompt} for prompt in prompts]))
    assert rows.column("prompt") == prompts
