"""The pass for old log-probs (and entropy) alone: the forward pass that a recomputed log-prob costs a step.

verl-like bench log-prob --model 1.5b --workload w1
verl-like bench log-prob --model cpu --ranks 2 --threads 1 -- actor_rollout_ref.actor.fsdp_config.dtype=bfloat16
"""

from __future__ import annotations

import argparse
from functools import partial

from verl_like.config.roles import ACTOR
from verl_like.engine.microbatch import computed_tokens
from verl_like.kit.bench import phase
from verl_like.kit.bench.inputs import grouped_rows
from verl_like.kit.bench.phase import POLICY, Job, measure_on_ranks, phase_job, share_of_rank
from verl_like.kit.bench.ranks import slowest, timed
from verl_like.kit.bench.report import Report, Row, finish
from verl_like.parallel.device_peak import DevicePeak, device_peak
from verl_like.parallel.dist import ProcessInfo
from verl_like.workers.roles import ActorRole


def main(arguments: argparse.Namespace) -> Report:
    """Measure, print the table."""
    with phase_job(arguments, f"{POLICY}.actor.old_log_probs=recompute") as job:
        work, ranks = measure_on_ranks("log-prob", measure, arguments, job)
    batch = grouped_rows(job.workload, job.spec.tokenizer_size, seed=1)
    responses, lengths = batch.response_length_B.tolist(), batch.num_tokens_B().tolist()
    peak = phase.total([peaks for _, peaks in ranks])
    seconds = slowest([taken for taken, _ in ranks])
    floor = job.cost.forward_flops(lengths, sum(responses)) / peak.flops
    columns = {"MFU": floor / seconds, "tokens/s": sum(lengths) / seconds}
    notes = [
        f"{sum(lengths):,} tokens, which the floor counts ({computed_tokens(batch):,} with what rows begin "
        f"with once), {sum(responses):,} of them through the head; {job.num_ranks} rank(s), micro-batches of "
        f"{job.spec.plan.roles[ACTOR].forward}. Floor: operations of a forward pass at {peak.flops / 1e9:,.0f} GFLOP/s "
        f"({peak.source}, all ranks).",
    ]
    row = Row(name="log-probs and entropy", seconds=seconds, floor_seconds=floor, figures=columns)
    report = Report(bench="log-prob", work=work, rows=[row], figures={"tokens": sum(lengths)}, notes=notes)
    return finish(report, arguments.json, arguments.compare)


def measure(process: ProcessInfo, run_id: str, job: Job, num_rounds: int) -> tuple[list[float], DevicePeak]:
    """Measure on each rank the seconds of each round, and the peak of the device."""
    batch = grouped_rows(job.workload, job.spec.tokenizer_size, seed=1)
    rows = share_of_rank(job, batch, process)
    actor = ActorRole(job.spec, process)
    peak = device_peak(process.device, actor.engine.compute_dtype)
    return [timed(partial(actor.log_probs, rows), process.device)[0] for _ in range(num_rounds + 1)], peak
