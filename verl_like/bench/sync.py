"""The weight sync alone: FSDP shards -> rollout engine, with its proof, and the share of each of its stages.

    verl-like bench sync --model 1.5b
    verl-like bench sync --model cpu --engine hf --ranks 2 --threads 1

Floor: the trained weights read once and written once per replica at the memory's bandwidth, and, where several GPUs
hold the shards, what each must receive over its links.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from verl_like.bench.bars import bars_of
from verl_like.bench.phase import POLICY, Job, measure_on_ranks, phase_job
from verl_like.bench.ranks import slowest, timed
from verl_like.bench.report import Report, Row, finish, number
from verl_like.bench.stages import StageClock, Staged
from verl_like.engine.fsdp import FSDPEngine
from verl_like.observe.roofline import sync_floor
from verl_like.parallel.device_peak import DevicePeak, device_peak, link_bandwidth
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout.rollout_engine import RolloutEngine
from verl_like.weight_sync.sync import SyncReport, WeightSync
from verl_like.workers.actor import ActorRole
from verl_like.workers.residency import Phase, Residency
from verl_like.workers.rollout import rollout_engine

WITH, WITHOUT = "with the proof, as in a step", "without the proof"
_ENGINE_STAGES = {
    "weight_checksums": "checksums of the shards",
    "export_weights": "gather and cast shards",
    "forward": "probe: trainer",
}
_ROLLOUT_STAGES = {
    "load_weights": "load and checksums",
    "weight_checksums": "checksums inside the engine",
    "cached_tokens": "cache emptied?",
    "score": "probe: rollout engine",
    "unload": "rest",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """Of one rank: seconds of each round, stages of the last, the last sync's report."""

    seconds: dict[str, list[float]]
    stages: dict[str, float]
    report: SyncReport
    peak: DevicePeak
    link: float | None  # bytes a second that its device can receive from others


def main(arguments: argparse.Namespace) -> Report:
    """Measure, print the table."""
    with phase_job(arguments, f"{POLICY}.rollout.name={arguments.engine}") as job:
        work, ranks = measure_on_ranks(
            "sync", measure, arguments, job, engine=str(job.spec.config.actor_rollout_ref.rollout.name)
        )
    return finish(report_of(job, ranks, work), arguments.json, arguments.compare)


def measure(process: ProcessInfo, run_id: str, job: Job, num_rounds: int) -> RankFigures:
    """On each rank: syncs with and without the proof in turn, from the trainer's phase each; one more by stages."""
    actor, rollout = ActorRole(job.spec, process).engine, rollout_engine(job.spec, process, run_id)
    residency = Residency([actor], rollout)
    try:
        peak = device_peak(process.device, rollout.dtype)
        synced = partial(weight_sync, job, process, actor, rollout)
        variants = {WITH: synced(prove=True), WITHOUT: synced(prove=False)}
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        version = 0
        for _ in range(num_rounds + 1):
            for name, variant in variants.items():
                version += 1
                residency.enter(Phase.train)
                seconds[name].append(timed(partial(_synced, variant, version, residency), process.device)[0])
        clock = StageClock(torch.cuda.synchronize if process.device.type == "cuda" else _nothing)
        residency.enter(Phase.train)
        with clock.stage("rest"):
            report = _synced(synced(prove=True, clock=clock), version + 1, residency)
        link = link_bandwidth(torch.cuda.get_device_name()) if process.device.type == "cuda" else None
        return RankFigures(seconds=seconds, stages=clock.seconds, report=report, peak=peak, link=link)
    finally:
        rollout.shutdown()


def weight_sync(
    job: Job,
    process: ProcessInfo,
    actor: FSDPEngine,
    rollout: RolloutEngine,
    *,
    prove: bool,
    clock: StageClock | None = None,
) -> WeightSync:
    """The run's sync, with or without its proof, or with its stages timed."""
    trained: Any = actor if clock is None else Staged(actor, clock, _ENGINE_STAGES)
    sampling: Any = rollout if clock is None else Staged(rollout, clock, _ROLLOUT_STAGES)
    settings = replace(job.spec.config.actor_rollout_ref.rollout, sync_probe=prove)
    return WeightSync(trained, sampling, settings, process, trainer_dtype=actor.compute_dtype)


def _synced(sync: WeightSync, version: int, residency: Residency) -> SyncReport:
    """As `workers.weights` does it: the engine is ready to sample afterwards."""
    report = sync.sync(version)
    residency.enter(Phase.rollout)
    return report


def report_of(job: Job, ranks: list[RankFigures], work: dict[str, object]) -> Report:
    """Seconds, bytes a second, distance to the floor; stages of the rank that was slowest by them."""
    shape, moved = job.run_shape([rank.peak for rank in ranks]), ranks[0].report.bytes
    floor = max(sync_floor(shape), link_floor(moved, len(ranks), ranks[0].link))
    rows = []
    for name in (WITH, WITHOUT):
        seconds = slowest([rank.seconds[name] for rank in ranks])
        columns = {"GB/s": shape.rollout_replicas * moved / seconds / 1e9}
        rows.append(Row(name=name, seconds=seconds, floor_seconds=floor, figures=columns))
    stages = max((rank.stages for rank in ranks), key=lambda found: sum(found.values()))
    whole = sum(stages.values())
    for name, taken in sorted(stages.items(), key=lambda item: -item[1]):
        rows.append(Row(name=f"- {name}", seconds=taken, figures={"share": taken / whole}))
    link = ranks[0].link
    notes = [
        f"{moved / 1e9:.3f} GB in {ranks[0].report.num_tensors} tensors to each of {shape.rollout_replicas} "
        f"replica(s), {ranks[0].report.num_read_back} of them compared inside the engine; probe gap "
        f"{number(ranks[0].report.probe_gap_mean)} nats on average. Floor: weights read once and written once per "
        f"replica at {shape.peak.bandwidth / 1e9:,.0f} GB/s ({shape.peak.source}, all ranks)"
        + (f", or received over links of {link / 1e9:,.0f} GB/s." if link and len(ranks) > 1 else "."),
        "Stages are of one further sync with the proof, each waited for; checksums are inside the load.",
    ]
    figures = {"bytes": moved, "proof_seconds": (rows[0].seconds or 0) - (rows[1].seconds or 0)}
    report = Report(bench="sync", work=work, rows=rows, figures=figures, notes=notes)
    report.notes.extend(bars_of(report))
    return report


def link_floor(num_bytes: int, num_ranks: int, link: float | None) -> float:
    """Seconds in which a rank that holds one of `num_ranks` shards can receive the others; 0 for an unknown link."""
    return 0.0 if link is None or num_ranks == 1 else num_bytes * (num_ranks - 1) / num_ranks / link


def _nothing() -> None:
    """A CPU has nothing queued."""
