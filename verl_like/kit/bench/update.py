"""One optimizer step of the training engine alone, on one rank or several, by path, precision and budget.

    verl-like bench update --model cpu --workload cpu --ranks 2 --threads 1
    verl-like bench update --model cpu --dtypes float32 bfloat16 --token-budgets 2048 4096
    verl-like bench update --model cpu --workload w1 --rows 64 --agents 4 6 --paths packed unshared
    verl-like bench update --model 1.5b --workload w1 -- actor_rollout_ref.actor.fsdp_config.optimizer_offload=True

Paths: packed (what rows begin with is shared, as the trainer does it), unshared (packed, every row whole), padded
(the reference: one row each, full logits). Two floors: the operations that this model must make (the head only for
tokens of responses, causal attention), and 6 x parameters x tokens, both at the rate of matrix products, on a CPU
measured between the rounds.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from verl_like.algorithms.minibatch import denominators_of
from verl_like.batch import Experience, Metric, merge_metrics
from verl_like.config.batch_plan import BatchPlan, MicroBatchRule
from verl_like.engine.microbatch import computed_tokens
from verl_like.kit.bench.bars import bars_of
from verl_like.kit.bench.inputs import grouped_rows
from verl_like.kit.bench.phase import POLICY, Job, measure_on_ranks, phase_job, share_of_rank
from verl_like.kit.bench.ranks import slowest, timed
from verl_like.kit.bench.report import Report, Row, finish
from verl_like.kit.bench.shapes import MODELS, SMALL
from verl_like.models.cost import BACKWARD
from verl_like.models.heads import dtype_of
from verl_like.observe.memory import reset_peak
from verl_like.parallel.device_peak import DevicePeak, device_peak
from verl_like.parallel.dist import ProcessInfo
from verl_like.workers.roles import ActorRole
from verl_like.workers.spec import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One engine and how it cuts its rows. budget: tokens of a micro-batch, padding counted with padded rows."""

    path: str
    dtype: str
    budget: int

    def __str__(self) -> str:
        return f"{self.path}, {self.dtype}, {self.budget} tokens"

    def rule(self, batch: Experience) -> MicroBatchRule:
        if self.path != "padded":
            return MicroBatchRule(max_tokens=self.budget)
        width = int(batch.prompt_length_B.max() + batch.response_length_B.max())
        return MicroBatchRule(max_sequences=max(1, self.budget // width))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """Figures of one rank, by variant.

    seconds: of each round.
    memory_gb: peak memory (CUDA).
    peaks: rates of the device, one for each round; by dtype instead of variant.
    """

    seconds: dict[str, list[float]]
    metrics: dict[str, dict[str, Metric]]
    memory_gb: dict[str, float]
    peaks: dict[str, list[DevicePeak]]


def main(arguments: argparse.Namespace) -> Report:
    """Measure every variant, alternating between them; print the table."""
    variants = variants_of(arguments)
    forks, turns = arguments.agents or (None, 1)
    with phase_job(arguments, f"{POLICY}.actor.optim.lr=0") as job:
        load = replace(job.workload, responses_per_prompt=forks or job.workload.responses_per_prompt)
        job, more = replace(job, workload=load), {"turns": turns} if turns > 1 else {}
        named = [str(variant) for variant in variants]
        work, ranks = measure_on_ranks("update", measure, arguments, job, variants, turns, variants=named, **more)
    batch = grouped_rows(job.workload, MODELS[arguments.model].vocab_size, seed=1, turns=turns)
    return finish(report_of(job, batch, variants, ranks, work), arguments.json, arguments.compare)


def variants_of(arguments: argparse.Namespace) -> list[Variant]:
    """All paths x precisions x budgets."""
    small = arguments.model in SMALL
    paths = arguments.paths or (["packed", "padded"] if small else ["packed"])
    dtypes = arguments.dtypes or ["float32" if not torch.cuda.is_available() else "bfloat16"]
    budgets = arguments.token_budgets or ([2048, 4096, 16384] if small else [16384])
    return [Variant(path=p, dtype=d, budget=b) for p in paths for d in dtypes for b in budgets]


def measure(
    process: ProcessInfo, run_id: str, job: Job, variants: list[Variant], turns: int, num_rounds: int
) -> RankFigures:
    """Measure every variant in turn on each rank, in rounds, so that a change of the machine's speed meets them all."""
    batch = grouped_rows(job.workload, job.spec.tokenizer_size, seed=1, turns=turns)
    rows = share_of_rank(job, batch, process)
    denominators = denominators_of(batch, job.workload.max_response)
    specs = {(v.path, v.dtype): spec_of(job.spec, v) for v in variants}
    actors = {key: ActorRole(spec, process) for key, spec in specs.items()}
    figures = RankFigures(seconds={str(v): [] for v in variants}, metrics={}, memory_gb={}, peaks={})
    for _ in range(num_rounds + 1):
        for dtype in dict.fromkeys(v.dtype for v in variants):
            peak = timed(lambda dtype=dtype: device_peak(process.device, dtype_of(dtype)), process.device)[1]
            figures.peaks.setdefault(dtype, []).append(peak)
        for variant in variants:
            actor = actors[variant.path, variant.dtype]
            actor.sizes = replace(actor.sizes, update=variant.rule(batch))
            reset_peak(process.device)
            work = partial(actor.update, [(rows, denominators)])
            seconds, (metrics,) = timed(work, process.device)
            figures.seconds[str(variant)].append(seconds)
            figures.metrics[str(variant)] = metrics
            if process.device.type == "cuda":
                figures.memory_gb[str(variant)] = torch.cuda.max_memory_allocated(process.device) / 1e9
    return figures


def spec_of(spec: WorkerSpec, variant: Variant) -> WorkerSpec:
    """The worker of a variant: its precision, and for padded rows the reference path with full logits."""
    policy, model = spec.config.actor_rollout_ref, spec.config.actor_rollout_ref.model
    if variant.path == "unshared":
        model = replace(model, share_prompts=False)
    if variant.path == "padded":
        model = replace(model, use_remove_padding=False, use_fused_kernels=False)
    actor = replace(policy.actor, fsdp_config=replace(policy.actor.fsdp_config, dtype=variant.dtype))
    config = replace(spec.config, actor_rollout_ref=replace(policy, model=model, actor=actor))
    return replace(spec, config=config, plan=BatchPlan.build(config, spec.plan.world_size))


def report_of(
    job: Job, batch: Experience, variants: list[Variant], ranks: list[RankFigures], work: dict[str, Any]
) -> Report:
    """Medians over rounds of the slowest rank, against the floors of all ranks together."""
    prompts, responses = batch.prompt_length_B.tolist(), batch.response_length_B.tolist()
    lengths, num_predicted = [p + r for p, r in zip(prompts, responses, strict=True)], sum(responses)
    flops = (1 + BACKWARD) * job.cost.forward_flops(lengths, num_predicted)
    gemm_flops = 2.0 * (1 + BACKWARD) * job.cost.all_weights * sum(lengths)
    rate = {dtype: rate_of([figures.peaks[dtype] for figures in ranks]) for dtype in ranks[0].peaks}
    rows = []
    for variant in variants:
        name = str(variant)
        seconds = slowest([figures.seconds[name] for figures in ranks])
        metrics = merge_metrics([figures.metrics[name] for figures in ranks])
        columns = {
            "x 6PT": seconds * rate[variant.dtype] / gemm_flops,
            "MFU": flops / (seconds * rate[variant.dtype]),
            "tokens/s": sum(lengths) / seconds,
            "micro-batches": metrics["perf/micro_batches"].value,
        }
        if "perf/micro_batch_fill" in metrics:
            columns["fill"] = metrics["perf/micro_batch_fill"].value
        if "perf/shared_token_share" in metrics:
            columns["shared"] = metrics["perf/shared_token_share"].value
        if "turns" in work:
            columns["grad norm"] = metrics["grad_norm"].value
        if ranks[0].memory_gb:
            columns["peak GB"] = max(figures.memory_gb[name] for figures in ranks)
        rows.append(Row(name=name, seconds=seconds, floor_seconds=flops / rate[variant.dtype], figures=columns))
    shared = computed_tokens(batch)
    figures: dict[str, Any] = {"tokens": sum(lengths), "tokens_prompts_once": shared, "gemm_flops": gemm_flops}
    figures |= {"gemm_rate": rate, "parameters": job.cost.all_weights}
    report = Report(bench="update", work=work, rows=rows, figures=figures, notes=notes_of(rows, figures, job, ranks))
    report.notes.extend(bars_of(report))
    return report


def rate_of(peaks_by_rank: list[list[DevicePeak]]) -> float:
    """Operations a second of all ranks together: median over rounds, the first left out as warm-up."""
    totals = [sum(peak.flops for peak in peaks) for peaks in zip(*peaks_by_rank, strict=True)]
    return statistics.median(totals[1:])


def notes_of(rows: list[Row], figures: dict[str, Any], job: Job, ranks: list[RankFigures]) -> list[str]:
    """Explain the columns, and state the ratios that the table does not show."""
    source = next(iter(ranks[0].peaks.values()))[0].source
    rates = ", ".join(f"{dtype} {rate / 1e9:,.0f} GFLOP/s" for dtype, rate in figures["gemm_rate"].items())
    notes = [
        f"{figures['tokens']:,} trained tokens, which every floor counts ({figures['tokens_prompts_once']:,} with what "
        f"rows begin with once); {figures['parameters']:,} parameters; {job.num_ranks} rank(s). Floor: operations of "
        f"the forward and backward pass at the rate of matrix products ({source}, all ranks: {rates}); x 6PT: seconds "
        "by 6 x parameters x trained tokens at that rate; recomputed activations count as no operations. shared: share "
        "of the trained tokens that needed no computation, because another row of their micro-batch begins with them.",
    ]
    best = {kind: min(row.seconds or 0 for row in rows if kind in row.name.split(", ")) for kind in kinds_of(rows)}
    for fast, slow in (("packed", "unshared"), ("packed", "padded"), ("bfloat16", "float32")):
        if fast in best and slow in best:
            notes.append(f"{fast} against {slow}, the best of each: {best[slow] / best[fast]:.2f} x as fast.")
    return notes


def kinds_of(rows: list[Row]) -> set[str]:
    """Paths and precisions in the names of the variants."""
    return {kind for row in rows for kind in row.name.split(", ")[:2]}
