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

from verl_like.data.rows import TableRows, messages_or_text, read_rows

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
        ("a.csv", b"a,b,a\n1,2,3\n", r"has the column 'a' more than once"),
        ("a.jsonl", b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n", r"line 1 is not JSON"),
        ("a.json", b'[{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}]", r"is not UTF-8 text with JSON"),
        ("a.csv", b"tools\n" + b"[" * 50_000 + b"]" * 50_000 + b"\n", r"'tools' must hold JSON"),
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


# Rows as they are written; Arrow unites the keys of each column's dictionaries.
WEATHER = {"name": "weather", "properties": {"city": {"type": "string"}, "y": {"z": 1}}}
SUM = {"name": "sum", "properties": {"x": {"enum": [1.5, None]}, "y": {}}}
UNLIKE: list[dict[str, Any]] = [
    {"tools": [WEATHER], "extra_info": {"a": 1, "deep": {"b": [1, None]}}},
    {"tools": [SUM, {"name": "none"}], "extra_info": {"deep": {}}},
    {"tools": [], "extra_info": {"c": [[{"d": 1}], [{"e": 2}, None]]}},
]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow", "a.feather", "a.json", "a.jsonl"])
def test_nulls_that_arrow_fills_in_leave_and_those_of_lists_stay(tmp_path: Path, name: str) -> None:
    rows = read_rows(write(tmp_path / name, UNLIKE))
    assert [rows.row(i) for i in range(3)] == UNLIKE
    assert rows.column("tools") == [row["tools"] for row in UNLIKE]
    assert rows.subcolumn("extra_info", "deep") == [{"b": [1, None]}, {}, None]


def test_other_nested_types_of_tables(tmp_path: Path) -> None:
    """A map's nulls were written, like a list's; a null column is a null; what JSON text holds stays."""
    pair = pa.struct([("a", pa.int64()), ("b", pa.int64())])
    columns = {
        "map": pa.array([[("k", None), ("l", {"a": 1})], None], pa.map_(pa.string(), pair)),
        "fixed": pa.array([[{"b": 2}, None], [{}, {"a": 3}]], pa.list_(pair, 2)),
        "large": pa.array([[{"a": 4}], []], pa.large_list(pair)),
        "union": pa.array([{"a": None}, None], pa.struct([("a", pa.null())])),
        "text": pa.array(['{"a": null}', None]),
        "numbers": pa.array([[1, None], []]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = read_rows(tmp_path / "a.parquet")
    first, second = rows.row(0), rows.row(1)
    assert first == {
        "map": {"k": None, "l": {"a": 1}}, "fixed": [{"b": 2}, None], "large": [{"a": 4}], "union": {},
        "text": '{"a": null}', "numbers": [1, None],
    }  # fmt: skip
    assert second == {
        "map": None, "fixed": [{}, {"a": 3}], "large": [], "union": None, "text": None, "numbers": []
    }  # fmt: skip


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.json.gz"])
def test_half_a_surrogate_pair_becomes_a_mark_and_is_counted(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Escaped, or as the bytes that some writers put in its place; two halves are their character."""
    cut = [{"prompt": f"{i}", "extra_info": {"k": "\U0001f600"}} for i in range(4)]
    cut[1]["extra_info"] = {"k\ud83d": ["x\ude00y", "中"]}
    cut[3]["extra_info"] = {"k": "\ud83d\ud83d\ude00"}
    rows = read_rows(write(tmp_path / name, cut))
    assert [row["extra_info"] for row in map(rows.row, range(4))] == [
        {"k": "\U0001f600"}, {"k\ufffd": ["x\ufffdy", "中"]}, {"k": "\U0001f600"}, {"k": "\ufffd\U0001f600"}
    ]  # fmt: skip
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{tmp_path / name}: 2 row(s), the first of them row 1, held half of a surrogate pair")
    (tmp_path / "raw.jsonl").write_bytes(b'{"prompt": "a\xed\xa0\xbd"}\n{"prompt": "\xed\xa0\xbd\xed\xb8\x80"}\n')
    assert read_rows(tmp_path / "raw.jsonl").column("prompt") == ["a\ufffd", "\U0001f600"]


def test_lines_of_json_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """U+2028, U+2029 and U+0085 stand in JSON as they are."""
    texts = [f"a{mark}b" for mark in "\u2028\u2029\x85"]
    lines = "\r\n".join(json.dumps({"prompt": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8", newline="")
    assert read_rows(tmp_path / "a.jsonl").column("prompt") == texts


@pytest.mark.parametrize(
    ("kind", "cells", "counts"),
    [
        (pa.list_(pa.string(), 2), [["a", "b"], ["c", "d"]], [2, 2]),
        (pa.list_view(pa.string()), [["a", "b"], None], [2, 0]),
        (pa.large_list(pa.string()), [["a"], []], [1, 0]),
        (pa.string(), ["a", ""], [1, 0]),
        (pa.large_binary(), [b"a", b""], [1, 0]),
        (pa.struct([("path", pa.string())]), [{"path": "a"}, None], [1, 0]),
        (pa.dictionary(pa.int8(), pa.string()), ["a", None], [1, 0]),
    ],
)
def test_items_are_counted_in_every_kind_of_column(kind: pa.DataType, cells: list[Any], counts: list[int]) -> None:
    column = (
        pa.array(cells, kind.value_type).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(cells, kind)
    )
    assert TableRows(pa.table({"a": column}), ["a"]).counts("a") == counts


MESSAGE = {"role": "user", "content": "It's \u00e9"}


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        (json.dumps([MESSAGE], indent=1), [MESSAGE]),
        (" [ " + json.dumps(dict(reversed(MESSAGE.items()))) + "]\n", [MESSAGE]),
        (json.dumps(MESSAGE), MESSAGE),
        (str([MESSAGE]), [MESSAGE]),  # as pandas writes lists into a csv
        (json.dumps([{"id": 1, **MESSAGE}]), [{"id": 1, **MESSAGE}]),
        (json.dumps([{"from": "human", "value": "x"}]), [{"from": "human", "value": "x"}]),  # to be refused with a hint
        *((text, text) for text in ('[{"from": "Rome", "to": "Paris"}]', '{"role": "admin"}', "[{'a': 1]", "{x} + 1?")),
        *((text, text) for text in ('[{"role": ' + "[" * 50_000 + "]" * 50_000 + "}]",)),
    ],
    ids=range(11),
)
def test_messages_are_told_from_text(cell: str, value: Any) -> None:
    assert messages_or_text(cell) == value
