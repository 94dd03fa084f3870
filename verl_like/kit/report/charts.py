"""Tables that the report draws. The drawing is Bokeh's, in the browser; report.js only hands it these tables."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_like.text import table_rows

History = Mapping[int, Mapping[str, float]]

# Phases of a step in the order in which they run. Those that are not here (verl's own, or a subclass's) come last.
PHASES = (
    *("gen", "reward", "old_log_prob", "ref", "teacher", "values", "adv", "samples", "update_critic", "update_actor"),
    *("save_checkpoint", "update_weights", "testing"),
)
_NO_PHASES = {"step", "episodes_lag_max"}


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: its lines are those of `metrics` that the run has, and of `points` (few and far between)."""

    section: str
    title: str
    metrics: Mapping[str, str]  # metric -> label
    note: str = ""
    points: str = ""  # metrics that begin so are drawn as points: the validations


def _chart(section: str, title: str, note: str, points: str, *lines: str) -> Chart:
    """Read a row of charts.txt."""
    return Chart(section, title, dict(line.split(": ") for line in lines), note, points)


CHARTS = tuple(_chart(*row) for row in table_rows(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")))


def chart_tables(histories: Sequence[History]) -> list[dict[str, Any]]:
    """The charts for which one of these runs has something to show."""
    there = {name for history in histories for metrics in history.values() for name in metrics}
    found = []
    for chart in CHARTS:
        lines = [{"metric": metric, "label": label} for metric, label in chart.metrics.items() if metric in there]
        wanted = sorted(name for name in there if chart.points and name.startswith(chart.points) and "/mean@" in name)
        points = [{"metric": name, "label": name.removeprefix(chart.points)} for name in wanted[:5]]
        if lines or points:
            texts = {"section": chart.section, "title": chart.title, "note": chart.note}
            found.append({**texts, "lines": lines, "points": points})
    return found


def columns(history: History) -> dict[str, Any]:
    """Make {"steps": [...], "metrics": {name: [number or null, ...]}}, with six significant digits."""
    steps = list(history)
    names = dict.fromkeys(name for metrics in history.values() for name in metrics)
    table = {name: [_short(history[step].get(name)) for step in steps] for name in sorted(names)}
    return {"steps": steps, "metrics": table}


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def phase_tables(history: History) -> dict[str, Any]:
    """Seconds and floors of each phase, step by step; steps that only validated are left out."""
    steps = [step for step, metrics in history.items() if metrics.get("timing_s/step")]
    names = {
        name.removeprefix("timing_s/") for step in steps for name in history[step] if name.startswith("timing_s/")
    } - _NO_PHASES
    ordered = [name for name in PHASES if name in names] + sorted(names - set(PHASES))
    seconds = {name: [_short(history[step].get(f"timing_s/{name}", 0.0)) for step in steps] for name in ordered}
    floors = {name: [_floor(history[step], name) for step in steps] for name in ordered}
    known = {name: values for name, values in floors.items() if any(values)}
    total = [_short(history[step]["timing_s/step"]) for step in steps]
    return {"steps": steps, "names": ordered, "seconds": seconds, "floors": known, "total": total}


def _floor(metrics: Mapping[str, float], phase: str) -> float | None:
    """Seconds that the phase would take at the hardware's peak."""
    ratio = metrics.get(f"perf/floor_ratio/{phase}")
    return _short(metrics.get(f"timing_s/{phase}", 0.0) / ratio) if ratio else None


def summary_rows(history: History) -> list[tuple[str, list[str]]]:
    """List (metric, [first, lowest, highest, last]) of everything that was logged, as text."""
    rows = []
    for name in sorted({name for metrics in history.values() for name in metrics}):
        values = [metrics[name] for metrics in history.values() if name in metrics]
        rows.append((name, [f"{value:.5g}" for value in (values[0], min(values), max(values), values[-1])]))
    return rows


def chart_library() -> list[str] | None:
    """The scripts of Bokeh (extra `report`), to stand in the page; None where it is not installed. It is found without
    being imported: importing it takes longer than writing the page."""
    spec = importlib.util.find_spec("bokeh")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "server" / "static" / "js"
    files = [folder / "bokeh.min.js", folder / "bokeh-api.min.js"]
    return [file.read_text(encoding="utf-8") for file in files] if all(file.is_file() for file in files) else None
