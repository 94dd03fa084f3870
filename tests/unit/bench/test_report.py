"""One form for all figures: columns, JSON and back, and a comparison that refuses other work or hardware."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from verl_like.kit.bench.report import Report, Row, check_comparable, markdown, number
from verl_like.kit.bench.shapes import BenchError

ROWS = [
    Row(name="packed", seconds=2.0, floor_seconds=0.5, figures={"MFU": 0.25}),
    Row(name="padded", seconds=6.0, floor_seconds=0.5),
    Row(name="memory"),
]


def report(**changes: Any) -> Report:
    settings: dict[str, Any] = {
        "bench": "update",
        "work": {"ranks": 2, "model": {"hidden": 8}, "shape": (1, 2)},
        "rows": ROWS,
        "hardware": {"device": "some GPU", "devices": 1},
        "versions": {"torch": "2.13"},
        "notes": ["Floor: a guess."],
    }
    return Report(**(settings | changes))


def test_the_table_by_hand() -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in report().table().splitlines()]
    assert lines[0] == ["update", "seconds", "floor, s", "x floor", "MFU"]
    assert lines[2:5] == [["packed", "2", "0.5", "4", "0.25"], ["padded", "6", "0.5", "12", ""], ["memory", *[""] * 4]]
    assert lines[6] == ["Floor: a guess."] and lines[7] == ["On some GPU, 1 devices; torch 2.13."]


def test_json_and_back(tmp_path: Path) -> None:
    report().save(tmp_path / "deep" / "a.json")
    again = Report.load(tmp_path / "deep" / "a.json")
    assert again.rows == ROWS and again.row("padded").floor_ratio == 12.0
    assert again.table() == report().table()
    assert "x earlier" in report().table(again)  # a tuple that JSON made a list is still the same work


def test_seconds_by_those_of_an_earlier_run() -> None:
    earlier = report(rows=[dataclasses.replace(ROWS[0], seconds=4.0)], versions={"torch": "2.12"})
    cells = [line.split("|")[-2].strip() for line in report().table(earlier).splitlines()[:5]]
    assert cells[0] == "x earlier" and cells[2:] == ["0.5", "", ""]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bench": "sync"}, "bench is 'update', was 'sync'"),
        ({"work": {"ranks": 4, "model": {"hidden": 8}, "shape": (1, 2)}}, "work.ranks is 2, was 4"),
        ({"work": {"ranks": 2, "model": {"hidden": 16}, "shape": (1, 2)}}, "work.model"),
        ({"work": {"ranks": 2}}, "work.shape"),
        ({"hardware": {"device": "another GPU", "devices": 1}}, "hardware.device is 'some GPU', was 'another GPU'"),
    ],
)
def test_other_work_or_hardware_is_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    earlier = report(**change)
    with pytest.raises(BenchError, match="cannot be compared") as refused:
        report().table(earlier)
    assert named in str(refused.value)


def test_a_comparison_is_refused_before_the_work_starts(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    Report(bench="update", work={"ranks": 1}, rows=[]).save(path)
    check_comparable("update", {"ranks": 1}, path)
    check_comparable("update", {"ranks": 1}, None)
    with pytest.raises(BenchError, match=r"work\.ranks is 2, was 1"):
        check_comparable("update", {"ranks": 2}, path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"rows": [{"nam": 1}]}'])
def test_another_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"other\.json is no file that a benchmark wrote"):
        Report.load(path)
    with pytest.raises(BenchError, match=r"missing\.json"):
        Report.load(tmp_path / "missing.json")


def test_numbers_have_three_digits_that_count() -> None:
    found = [number(value) for value in (None, 0.0, 0.012345, 1.2345, 123.456, 12345.6, -0.5)]
    assert found == ["", "0", "0.0123", "1.23", "123.5", "12,346", "-0.5"]


def test_markdown_columns_are_even() -> None:
    lines = markdown([["a", "b"], ["---", "---"], ["long name", "1"]]).splitlines()
    assert lines == ["| a         |   b |", "| --------- | --: |", "| long name |   1 |"]
