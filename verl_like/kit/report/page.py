"""Puts the pages together: the report of one run, and runs side by side (the keys that differ, the answers of each
to the same validation prompts). Everything from a run is escaped. Charts are tables,
which Bokeh draws in the browser (report.js)."""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from verl_like.config.schema import keys
from verl_like.kit.report.content import (
    config_rows,
    environment_rows,
    facts,
    health_cards,
    in_script,
    proof_rows,
    quiet_rules,
    sample_lines,
    shown,
    tiles,
    title_of,
    wanted_steps,
)
from verl_like.observe.health import check_health
from verl_like.observe.run_folder import FIELDS, SAMPLES, Run, flat, read_run
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


CHARTS = tuple(_chart(*row) for row in table_rows(Path(__file__).with_name("charts.txt").read_text(encoding="utf-8")))


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


_MOST_PROMPTS = 64


def run_names(runs: Sequence[Run]) -> list[str]:
    """A short name for each run: its folder, with as much of the path as makes the names differ."""
    paths = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = [os.path.join(*parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(parts[-1:])} ({number})" for number, parts in enumerate(paths, start=1)]


def differing_keys(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Keys whose values are not the same in all runs, with their meaning."""
    known, tables = keys(), [flat(run.config) for run in runs]
    paths = dict.fromkeys(path for table in tables for path in table)
    missing = object()
    rows = []
    for path in paths:
        values = [table.get(path, missing) for table in tables]
        if any(value != values[0] for value in values):
            texts = ["(not there)" if value is missing else shown(path, value) for value in values]
            rows.append({"key": path, "values": texts, "meaning": known[path].doc if path in known else ""})
    return rows


def answers_side_by_side(runs: Sequence[Run]) -> dict[str, Any]:
    """The newest kept answers of each run to validation prompts that all have: {"steps", "rows"}."""
    newest: list[dict[tuple[str, str], dict[str, Any]]] = []
    steps: list[int | None] = []
    for run in runs:
        records = run.validation_samples
        last = max((record["step"] for record in records), default=None)
        steps.append(last)
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for record in records:
            if record["step"] == last:
                found.setdefault((record["data_source"], record["input"]), record)
        newest.append(found)
    common = [key for key in newest[0] if all(key in other for other in newest[1:])][:_MOST_PROMPTS] if newest else []
    rows = []
    for key in common:
        answers = [table[key] for table in newest]
        scores = [answer["score"] for answer in answers]
        rows.append({"prompt": key[1], "truth": answers[0]["gts"], "answers": answers, "differs": len(set(scores)) > 1})
    return {"steps": steps, "rows": sorted(rows, key=lambda row: not row["differs"])}


_HERE = Path(__file__).parent
REPORT, COMPARISON = "report.html", "compare.html"


def write_report(run_folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run, finished or not, to `out` or into its folder. Returns the path.

    FileNotFoundError for a folder without a run.
    """
    run = read_run(run_folder)
    verdicts = check_health(run.steps)
    kept = sorted(int(path.stem) for path in (run.path / SAMPLES / "train").glob("*.jsonl"))
    samples = sample_lines(run, wanted_steps(verdicts, kept))
    kept = sorted({record["step"] for record in map(json.loads, samples) if record["part"] == "training"})
    content = {
        "title": title_of(run),
        "facts": facts(run),
        "last_step": max(run.steps, default=0),
        "tiles": tiles(run),
        "cards": health_cards(verdicts, kept),
        "quiet": quiet_rules(verdicts),
        "config": config_rows(run),
        "environment": [*environment_rows(run.environment), *proof_rows(run.path)],
        "earlier": [(start["started"], start["command"]) for start in run.environment.get("earlier", [])],
        "summary": summary_rows(run.steps),
        "timed": any("timing_s/step" in metrics for metrics in run.steps.values()),
        "folder": str(run.path),
    }
    data = {"runs": [{"name": "", **columns(run.steps)}], "charts": chart_tables([run.steps])}
    data |= {"phases": phase_tables(run.steps), "fields": sorted(FIELDS)}
    return _write("report.html.jinja", content, data, Path(out or run.path / REPORT), samples)


def write_comparison(folders: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] = COMPARISON) -> Path:
    """Write two or three runs side by side. Returns the path. Raises FileNotFoundError for a folder without a run."""
    runs = [read_run(folder) for folder in folders]
    names = run_names(runs)
    content = {
        "title": " / ".join(names),
        "runs": [
            {"name": name, "title": title_of(run), "facts": facts(run), "tiles": tiles(run), "folder": str(run.path)}
            for name, run in zip(names, runs, strict=True)
        ],
        "keys": differing_keys(runs),
        "answers": answers_side_by_side(runs),
    }
    tables = [{"name": name, **columns(run.steps)} for name, run in zip(names, runs, strict=True)]
    data = {"runs": tables, "charts": chart_tables([run.steps for run in runs])}
    return _write("compare.html.jinja", content, data, Path(out), [])


def _write(template: str, content: dict[str, Any], data: dict[str, Any], out: Path, samples: Sequence[str]) -> Path:
    environment = Environment(loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    library = chart_library()
    text = environment.get_template(template).render(
        **content,
        data=in_script(json.dumps(data, allow_nan=False, separators=(",", ":"))),
        samples="[" + ",\n".join(samples) + "]",
        style=(_HERE / "report.css").read_text(encoding="utf-8"),
        script="\n".join((_HERE / name).read_text(encoding="utf-8") for name in ("charts.js", "rollouts.js")),
        library=None if library is None else [script.replace("</script", "<\\/script") for script in library],
        written=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )
    out = out.expanduser()
    temporary = out.with_name(f".{out.name}.{os.getpid()}")  # a browser never loads half a page
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        if temporary.is_file():
            temporary.unlink()
        raise OSError(f"--out={out} cannot be written ({error.strerror}); name a file in a folder of yours") from error
    return out
