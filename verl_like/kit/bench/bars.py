"""The project's own targets for steps, updates and syncs, stated with what a run reached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from verl_like.kit.bench.report import Report, Row
from verl_like.kit.bench.shapes import MODELS, WORKLOADS

STEP_TO_TARGET = 1.3  # of generation alone + 8 x parameters x tokens at 40% of the peak
MFU, SYNC_SECONDS = 0.40, 0.15
PACKED_TO_PADDED, HALF_TO_FLOAT32 = 1.8, 1.8  # how many times as fast an update is
SERVED = 0.8  # of one client's tokens a second, by many who share passes of the server
TREE_TO_ROWS = 3.0  # and that of 4 forks of 6 turns, beside rows that share nothing
UPDATE_TO_GEMM = {1: 1.35, 2: 1.5}  # ranks -> of 6 x parameters x tokens at the measured rate, float32 on a CPU


def bars_of(report: Report) -> list[str]:
    """One line for each target that is set for this bench, model, workload and device; none for other work."""
    if "model" not in report.work:
        return []
    if report.bench in ("update", "sync"):
        return list(_of_update(report) if report.bench == "update" else _of_sync(report))
    work, figures = report.work, report.figures
    is_model, is_load = (
        {name: asdict(shape) == work[key] for name, shape in shapes.items()}
        for key, shapes in (("model", MODELS), ("workload", WORKLOADS))
    )
    if "H200" in str(report.hardware["device"]) and work["ranks"] == 1:
        return list(_on_h200(is_model, is_load, figures))
    ranks = work["ranks"]
    if "cores" in report.hardware and is_model["cpu"] and is_load["cpu"] and ranks in UPDATE_TO_GEMM:
        return [bar("update by 6 x parameters x tokens", figures["update_to_gemm_floor"], UPDATE_TO_GEMM[ranks])]
    return []


def _on_h200(is_model: dict[str, bool], is_load: dict[str, bool], figures: dict[str, Any]) -> Iterator[str]:
    if is_load["w1"] and (is_model["0.5b"] or is_model["1.5b"]):
        alone = figures["generation_alone_seconds"] is not None
        name = f"step by (generation {'alone' if alone else 'of the step itself; use --rollout'} + 8PT at 40%)"
        yield bar(name, figures["step_to_target"], STEP_TO_TARGET)
    if is_model["1.5b"]:
        yield bar("MFU of the update", figures["mfu_update"], MFU, at_least=True)
        yield bar("weight sync, seconds", figures["sync_seconds"], SYNC_SECONDS)


def _of_update(report: Report) -> Iterator[str]:
    """State the bars of `bench update` with the fastest row of each kind. MFU counts no token of a shared prompt."""
    rows = [row for row in report.rows if row.seconds]
    ranks = report.work["ranks"]
    if "H200" in str(report.hardware["device"]) and report.work["model"] == asdict(MODELS["1.5b"]) and ranks == 1:
        packed = [row.figures for row in rows if row.name.startswith("packed, bfloat16")]
        reached = [figures["MFU"] * (1 - figures.get("shared", 0.0)) for figures in packed]
        yield from [bar("MFU of the update", max(reached), MFU, at_least=True)] if reached else []
    if "cores" not in report.hardware or report.work["model"] != asdict(MODELS["cpu"]):
        return
    fastest: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: -(row.seconds or 0.0)):
        fastest[row.name.rpartition(", ")[0]] = row
    exact = fastest.get("packed, float32")
    if "turns" in report.work:
        alone = fastest.get("unshared, float32")
        if exact and alone:
            times = (alone.seconds or 0.0) / (exact.seconds or 1.0)
            yield bar("agents, times as fast as rows that share nothing", times, TREE_TO_ROWS, at_least=True)
        return
    if exact and ranks in UPDATE_TO_GEMM:
        yield bar("update by 6 x parameters x tokens", exact.figures["x 6PT"], UPDATE_TO_GEMM[ranks])
    pairs = (
        ("padded, float32", "packed, float32", PACKED_TO_PADDED),
        ("packed, float32", "packed, bfloat16", HALF_TO_FLOAT32),
    )
    for slow, fast, limit in pairs:
        if slow in fastest and fast in fastest:
            times = (fastest[slow].seconds or 0.0) / (fastest[fast].seconds or 1.0)
            yield bar(f"{fast}, times as fast as {slow}", times, limit, at_least=True)


def _of_sync(report: Report) -> Iterator[str]:
    if "H200" in str(report.hardware["device"]) and report.work["model"] == asdict(MODELS["1.5b"]):
        yield bar("weight sync, seconds", report.rows[0].seconds or 0.0, SYNC_SECONDS)


def bar(name: str, value: float, limit: float, *, at_least: bool = False) -> str:
    """Write the verdict on a bar: `Bar: sync 0.120, at most 0.15: met.`"""
    met = value >= limit if at_least else value <= limit
    side = "at least" if at_least else "at most"
    return f"Bar: {name} {value:.3f}, {side} {limit}: {'met' if met else 'MISSED'}."
