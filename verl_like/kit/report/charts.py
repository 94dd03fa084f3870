"""Tables that the report draws. The drawing is Bokeh's, in the browser; report.js only hands it these tables."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


CHARTS: tuple[Chart, ...] = (
    Chart("Learning", "Score", {"critic/score/mean": "training"}, points="val-core/"),
    Chart("Learning", "Loss", {"train/loss": "training", "val/loss": "validation"}, note="-log p of a trained token"),
    Chart(
        "Learning",
        "Reward after shaping",
        {"critic/rewards/mean": "reward", "critic/baseline/mean": "baseline"},
        note="score, shaping, KL penalty",
    ),
    Chart(
        "Learning",
        "Groups without signal",
        {"critic/group_zero_std_fraction": "all scores equal"},
        note="share of the prompts",
    ),
    Chart("Update", "Entropy", {"actor/entropy": "entropy"}, note="nats per token"),
    Chart("Update", "Gradient norm", {"actor/grad_norm": "actor", "critic/grad_norm": "critic"}),
    Chart(
        "Update",
        "KL",
        {
            "actor/ppo_kl": "to the sampled policy",
            "actor/kl_loss": "to the reference (loss)",
            "critic/kl": "to the reference (reward)",
        },
        note="nats per token",
    ),
    Chart(
        "Update",
        "Clipped tokens",
        {"actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "dual clip"},
        note="share",
    ),
    Chart(
        "Update",
        "Trainer against rollout engine",
        {"training/rollout_probs_diff_mean": "mean", "training/rollout_probs_diff_max": "max"},
        note="difference of probabilities",
    ),
    Chart("Update", "Learning rate", {"actor/lr": "actor", "critic/lr": "critic"}),
    Chart("Update", "Policy loss", {"actor/pg_loss": "loss"}),
    Chart("Update", "Critic", {"critic/vf_explained_var": "explained variance", "critic/vf_loss": "loss"}),
    Chart(
        "Responses",
        "Response length",
        {"response_length/mean": "mean", "response_length/max": "max", "response_length/min": "min"},
        note="tokens",
    ),
    Chart(
        "Responses",
        "Truncated and repeated",
        {
            "response_length/clip_ratio": "truncated",
            "response/duplicate_fraction": "repeated",
            "reward/failure_fraction": "reward failed",
        },
        note="share of responses",
    ),
    Chart("Responses", "Turns", {"num_turns/mean": "mean", "num_turns/max": "max"}),
    Chart("Speed", "Throughput", {"perf/throughput": "tokens"}, note="tokens/s per device"),
    Chart("Speed", "Step time", {"timing_s/step": "step"}, note="seconds"),
    Chart(
        "Speed",
        "Use of the hardware",
        {"perf/mfu/actor": "update", "perf/mfu/actor_infer": "log-probs"},
        note="share of the peak",
    ),
    Chart(
        "Speed",
        "Memory",
        {"perf/max_memory_allocated_gb": "device, peak", "perf/cpu_memory_used_gb": "machine"},
        note="GiB",
    ),
    Chart(
        "Speed",
        "Memory of a device by phase",
        {
            "perf/memory_peak/gen": "generation",
            "perf/memory_forecast/gen": "generation, forecast",
            "perf/memory_peak/update_actor": "update",
            "perf/memory_forecast/update_actor": "update, forecast",
        },
        note="GiB",
    ),
)


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
