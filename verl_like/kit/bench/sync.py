"""The weight sync alone: FSDP shards -> rollout engine, with its proof, and the share of each of its stages.

    verl-like bench sync --model 1.5b
    verl-like bench sync --model cpu --engine hf --ranks 2 --threads 1
    verl-like bench sync --model cpu --engine hf --channel broadcast

Trainer and engine are in one process (--channel inproc), or the engine in one of its own: one for each rank beside it
(ipc), or one that all ranks together send to (broadcast).

Floor: the trained weights read once and written once per replica at the memory's bandwidth, and, where several GPUs
hold the shards, what each must receive over its links.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verl_like.engine.fsdp import FSDPEngine
from verl_like.kit.bench.bars import bars_of
from verl_like.kit.bench.engine_process import EngineProcess, EngineSettings, Hosted, connected, wanted
from verl_like.kit.bench.engine_process import receive as receive_update
from verl_like.kit.bench.meters import LiveBytes, StageClock, Staged
from verl_like.kit.bench.phase import POLICY, Job, measure_on_ranks, phase_job
from verl_like.kit.bench.ranks import slowest, timed
from verl_like.kit.bench.report import Report, Row, finish, number
from verl_like.kit.bench.shapes import BenchError
from verl_like.kit.speed.roofline import sync_floor
from verl_like.parallel.device_peak import DevicePeak, device_peak, link_bandwidth
from verl_like.parallel.dist import ProcessInfo
from verl_like.weight_sync.channel import SendingEnd, TakesPart
from verl_like.weight_sync.header import Wanted
from verl_like.weight_sync.receiver import WeightReceiver
from verl_like.weight_sync.source import WeightSource
from verl_like.weight_sync.verdict import Receipt, SyncReport, verdict
from verl_like.workers.residency import Phase, Residency
from verl_like.workers.roles import ActorRole
from verl_like.workers.rollout import rollout_engine
from verl_like.workers.weights import sync_within

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
    """Figures of one rank.

    seconds: of each round.
    peak_bytes: most memory of tensors alive at a time that a sync makes, in this process and in the engine's.
    stages: seconds of each stage of one more sync, in one process.
    report: the report of that sync.
    """

    seconds: dict[str, list[float]]
    peak_bytes: dict[str, tuple[int, int]]
    stages: dict[str, float]
    report: SyncReport
    peak: DevicePeak
    link: float | None  # bytes a second that its device can receive from others


def main(arguments: argparse.Namespace) -> Report:
    """Measure, print the table."""
    with phase_job(arguments, f"{POLICY}.rollout.name={arguments.engine}") as job:
        engine, kind = str(job.spec.config.actor_rollout_ref.rollout.name), arguments.channel
        if kind == "broadcast" and job.device == "cuda" and torch.cuda.device_count() <= job.num_ranks:
            raise BenchError(
                f"--channel broadcast needs a GPU for the engine beside the trainer's {job.num_ranks} (NCCL wants one "
                f"for each process), but torch sees {torch.cuda.device_count()}: use --channel ipc, or fewer --ranks"
            )
        more = {"engine": engine} if kind == "inproc" else {"engine": engine, "channel": kind}
        work, ranks = measure_on_ranks("sync", measure, arguments, job, kind, **more)
    return finish(report_of(job, ranks, work), arguments.json, arguments.compare)


def measure(process: ProcessInfo, run_id: str, job: Job, kind: str, num_rounds: int) -> RankFigures:
    """Measure on each rank syncs with and without the proof in turn, each from the trainer's phase on.

    One more of each counts the memory; in one process, a last one is timed by stages.
    """
    actor = ActorRole(job.spec, process).engine
    syncs: _Here | _Between = (_Here if kind == "inproc" else partial(_Between, kind))(job, process, run_id, actor)
    try:
        seconds: dict[str, list[float]] = {name: [] for name in (WITH, WITHOUT)}
        peaks: dict[str, tuple[int, int]] = {}
        version = 0
        for _ in range(num_rounds + 1):
            for name, found in seconds.items():
                version += 1
                syncs.prepare()
                found.append(timed(partial(syncs.sync, name, version, receive), process.device)[0])
        for name in seconds:
            version += 1
            syncs.prepare()
            with LiveBytes(process.device) as live:
                theirs = syncs.sync(name, version, receive_counted)
            peaks[name] = live.peak, theirs
        stages, report = syncs.by_stages(version + 1)
        peak = device_peak(process.device, syncs.dtype)
        link = link_bandwidth(torch.cuda.get_device_name()) if process.device.type == "cuda" else None
        return RankFigures(seconds=seconds, peak_bytes=peaks, stages=stages, report=report, peak=peak, link=link)
    finally:
        syncs.close()


class _Here:
    """Syncs of the hybrid engine."""

    def __init__(self, job: Job, process: ProcessInfo, run_id: str, actor: FSDPEngine) -> None:
        self._rollout = rollout_engine(job.spec, process, run_id)
        self.dtype, self._device = self._rollout.dtype, process.device
        self._residency = Residency([actor], self._rollout)
        self._actor, self._process, self._settings = actor, process, job.spec.config.actor_rollout_ref.rollout
        self._variants = {WITH: self._made(prove=True), WITHOUT: self._made(prove=False)}

    def prepare(self) -> None:
        """Go back to the trainer's phase."""
        self._residency.enter(Phase.train)

    def sync(self, name: str, version: int, _: object) -> int:
        """Sync once; nothing is counted elsewhere."""
        self._run(self._variants[name], version)
        return 0

    def _made(self, *, prove: bool, clock: StageClock | None = None) -> Callable[[int], SyncReport]:
        """The run's sync, with or without its proof, or with its stages timed."""
        trained: Any = self._actor if clock is None else Staged(self._actor, clock, _ENGINE_STAGES)
        sampling: Any = self._rollout if clock is None else Staged(self._rollout, clock, _ROLLOUT_STAGES)
        source = WeightSource(trained, self._process, prove=prove, trainer_dtype=self._actor.compute_dtype)
        return partial(sync_within, source, WeightReceiver(sampling, self._settings, self._process))

    def _run(self, sync: Callable[[int], SyncReport], version: int) -> SyncReport:
        report = sync(version)
        self._residency.enter(Phase.rollout)  # it is ready to sample, as in a run
        return report

    def by_stages(self, version: int) -> tuple[dict[str, float], SyncReport]:
        """Sync once more, with the proof, and measure the seconds of each stage."""
        clock = StageClock(torch.cuda.synchronize if self._device.type == "cuda" else lambda: None)
        self.prepare()
        with clock.stage("rest"):
            report = self._run(self._made(prove=True, clock=clock), version)
        return clock.seconds, report

    def close(self) -> None:
        """End the engine."""
        self._rollout.shutdown()


class _Between:
    """Syncs to an engine in another process: one for each rank by ipc; one for all, of the first rank, by broadcast."""

    def __init__(self, kind: str, job: Job, process: ProcessInfo, run_id: str, actor: FSDPEngine) -> None:
        policy, self._engine = job.spec.config.actor_rollout_ref, None
        self._channel: SendingEnd = TakesPart()
        if kind == "ipc" or process.rank == 0:
            settings = EngineSettings(
                rollout=policy.rollout,
                model=policy.model,
                tokenizer_size=job.spec.tokenizer_size,
                max_model_len=job.spec.max_model_len,
                run_id=run_id,
                device=process.device.type,
                tokenizer=job.spec.config.data.tokenizer,
                local_rank=process.local_rank if kind == "ipc" else process.world_size,
            )
            self._engine = EngineProcess(settings)
            room = policy.rollout.update_weights_bucket_megabytes << 20
            self._channel = connected(kind, self._engine, process.device, run_id=run_id, bucket_bytes=room)
        self._wanted: Wanted = _from_first(None if self._engine is None else self._engine.call(wanted))
        self.dtype = self._wanted.dtype
        made = partial(WeightSource, actor, process, trainer_dtype=actor.compute_dtype)
        self._sources = {WITH: made(prove=True), WITHOUT: made(prove=False)}

    def prepare(self) -> None:
        """Do nothing: there is no other engine to make room for."""

    def sync(self, name: str, version: int, function: Callable[[Hosted], tuple[Receipt, int]]) -> int:
        """Sync once; return what `function` counted in the engine's process."""
        received = None if self._engine is None else self._engine.begin(function)
        sent = self._sources[name].send(version, self._wanted, self._channel)
        receipt, peak = (None, 0) if received is None else received()
        self._report: SyncReport = _from_first(None if receipt is None else verdict([sent], [receipt]))
        return peak

    def by_stages(self, version: int) -> tuple[dict[str, float], SyncReport]:
        """Sync once more with the proof. Its stages overlap, so that none is timed alone."""
        self.sync(WITH, version, receive)
        return {}, self._report

    def close(self) -> None:
        """End channel and engine."""
        self._channel.close()
        if self._engine is not None:
            self._engine.shutdown()


def _from_first(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def receive(engine: Hosted) -> tuple[Receipt, int]:
    """Receive an update, in the engine's process."""
    return receive_update(engine), 0


def receive_counted(engine: Hosted) -> tuple[Receipt, int]:
    """Receive an update, in the engine's process, and count the most bytes that it takes there."""
    with LiveBytes(engine.device) as live:
        receipt = receive_update(engine)
    return receipt, live.peak


def report_of(job: Job, ranks: list[RankFigures], work: dict[str, object]) -> Report:
    """Seconds, bytes a second, distance to the floor; stages of the rank that was slowest by them."""
    shape, moved = job.run_shape([rank.peak for rank in ranks]), ranks[0].report.bytes
    floor = max(sync_floor(shape), link_floor(moved, len(ranks), ranks[0].link))
    rows = []
    for name in (WITH, WITHOUT):
        seconds = slowest([rank.seconds[name] for rank in ranks])
        trainer, engine = (max(peaks) for peaks in zip(*(rank.peak_bytes[name] for rank in ranks), strict=True))
        columns = {"GB/s": shape.rollout_replicas * moved / seconds / 1e9, "peak MB": trainer / 1e6}
        if engine:
            columns["engine's peak MB"] = engine / 1e6
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
        "Peak: of tensors that a sync makes; with the proof also checksums and the probe's forward passes.",
    ]
    if stages:
        notes.append("Stages are of one further sync with the proof, each waited for; checksums are inside the load.")
    figures = {"bytes": moved, "proof_seconds": (rows[0].seconds or 0) - (rows[1].seconds or 0)}
    report = Report(bench="sync", work=work, rows=rows, figures=figures, notes=notes)
    report.notes.extend(bars_of(report))
    return report


def link_floor(num_bytes: int, num_ranks: int, link: float | None) -> float:
    """Seconds in which a rank that holds one of `num_ranks` shards can receive the others; 0 for an unknown link."""
    return 0.0 if link is None or num_ranks == 1 else num_bytes * (num_ranks - 1) / num_ranks / link
