"""Generation alone: the rollout engine on made-up weights, every response as long as it was drawn (end tokens ignored).

    verl-like bench rollout --model 1.5b --workload w1 --json rollout.json
    verl-like bench rollout --model cpu --workload cpu --engine hf --ranks 2 --threads 1
    verl-like bench rollout --model cpu --workloads cpu w1 w2 --rows 16 --engines vllm sglang hf

Rounds have other prompts, so that no prefix is cached from the round before. The floor is that of the trainer's own
report (kit/speed/roofline.py): operations, or weights and cache that decoding must read, whichever takes longer.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from verl_like.kit.bench.inputs import random_prompts
from verl_like.kit.bench.phase import POLICY, Job, measure_on_ranks, phase_job
from verl_like.kit.bench.ranks import slowest, timed
from verl_like.kit.bench.report import Report, Row, check_comparable, finish
from verl_like.kit.bench.shapes import BenchError
from verl_like.kit.speed.roofline import generation_floor
from verl_like.models.loading import build_meta_model, load_hf_config
from verl_like.models.lora import adapters_apart, attach
from verl_like.parallel.device_peak import DevicePeak, device_peak
from verl_like.parallel.dist import ProcessInfo
from verl_like.rollout.rollout_engine import GenerationRequest, request_seed
from verl_like.rollout.sampling import train_sampling
from verl_like.trainer.dispatch import rows_per_rank
from verl_like.workers.rollout import rollout_engine


def main(arguments: argparse.Namespace) -> Report:
    """Measure, print the table. With --engines or --workloads: a row for each engine at each workload, in turn."""
    engines, workloads = arguments.engines or [arguments.engine], arguments.workloads or [arguments.workload]
    if len(engines) * len(workloads) == 1:
        one = argparse.Namespace(**vars(arguments) | {"engine": engines[0], "workload": workloads[0]})
        return finish(measured(one), arguments.json, arguments.compare)
    work: dict[str, object] = {"model": arguments.model, "engines": engines, "workloads": workloads}
    work |= {"rows": arguments.rows, "ranks": arguments.ranks, "threads": arguments.threads}
    check_comparable("rollout", work, arguments.compare)
    rows, notes = [], []
    for workload in workloads:
        for engine in engines:
            options = {"engine": engine, "workload": workload, "compare": None}
            report = measured(argparse.Namespace(**vars(arguments) | options))
            rows.append(dataclasses.replace(report.rows[0], name=f"{workload}, {engine}"))
            print(f"{rows[-1].name}: {rows[-1].figures['tokens/s']:,.0f} tokens/s", flush=True)
        notes += [f"{workload}: {note}" for note in report.notes]
    return finish(Report(bench="rollout", work=work, rows=rows, notes=notes), arguments.json, arguments.compare)


def measured(arguments: argparse.Namespace) -> Report:
    """The figures of one engine at one workload."""
    with phase_job(arguments, f"{POLICY}.rollout.name={arguments.engine}", f"{POLICY}.rollout.ignore_eos=True") as job:
        work, ranks = measure_on_ranks(
            "rollout", measure, arguments, job, engine=str(job.spec.config.actor_rollout_ref.rollout.name)
        )
    return report_of(job, ranks, work)


def measure(process: ProcessInfo, run_id: str, job: Job, num_rounds: int) -> tuple[list[float], DevicePeak]:
    """Measure on each rank the seconds of each round, and the device's peak in the rollout's precision."""
    engine = rollout_engine(job.spec, process, run_id)
    try:
        peak = device_peak(process.device, engine.dtype)
        engine.load_weights(random_weights(job, engine.dtype, process.device), 0)
        seconds = []
        for number in range(num_rounds + 1):
            requests = requests_of(job, process.rank, number)
            taken, completions = timed(partial(engine.generate, requests), process.device)
            wanted = {request.request_id: request.sampling.max_tokens for request in requests}
            short = [c.request_id for c in completions if len(c.sampled) != wanted[c.request_id]]
            if short:
                raise BenchError(f"{len(short)} responses do not have the length that was asked for, {short[0]} first")
            seconds.append(taken)
        return seconds, peak
    finally:
        engine.shutdown()


def requests_of(job: Job, rank: int, number: int) -> list[GenerationRequest]:
    """Make the requests of this rank's replica for round `number`.

    The first rank of a tensor-parallel replica has them all, the others none.
    """
    rollout, workload = job.spec.config.actor_rollout_ref.rollout, job.workload
    prompts = random_prompts(workload, job.spec.tokenizer_size, seed=number)
    plan, n, seed = job.spec.plan, workload.responses_per_prompt, job.spec.config.trainer.seed
    if rank % plan.tensor_parallel_size:
        return []
    lengths, sampling = workload.response_lengths(seed=1), train_sampling(rollout, ())
    shares = rows_per_rank([len(ids) for ids in prompts], plan.rollout_replicas, balance=True)
    return [
        GenerationRequest(
            request_id=f"{number}-{prompt}-{sample}",
            prompt_ids=prompts[prompt],
            sampling=dataclasses.replace(sampling, max_tokens=lengths[prompt * n + sample]),
            seed=request_seed(seed, number, prompt, sample) if rollout.seed_per_request else None,
        )
        for prompt in shares[rank // plan.tensor_parallel_size]
        for sample in range(n)
    ]


def random_weights(job: Job, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The weight stream of a model that was never trained: normal with deviation 0.02, norms one; LoRA
    adapters too where the engine keeps them apart."""
    model = job.spec.config.actor_rollout_ref.model
    tree = build_meta_model(model, load_hf_config(model), kind="policy")
    if adapters_apart(model):
        attach(tree.hf, model, dtype=dtype, seed=1)
    generator = torch.Generator(device).manual_seed(1)
    for name, parameter in tree.hf.named_parameters():
        if parameter.ndim == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            yield name, torch.full(parameter.shape, fill, dtype=dtype, device=device)
        else:
            values = torch.empty(parameter.shape, dtype=dtype, device=device)
            yield name, values.normal_(0.0, 0.02, generator=generator)


def report_of(job: Job, ranks: list[tuple[list[float], DevicePeak]], work: dict[str, object]) -> Report:
    """Tokens a second and the distance to the floor."""
    shape, workload = job.run_shape([peak for _, peak in ranks]), job.workload
    responses = workload.response_lengths(seed=1)
    prompts = [workload.prompt_length] * len(responses)
    seconds, sampled = slowest([taken for taken, _ in ranks]), sum(responses)
    own = [slowest([taken]) for taken, _ in ranks]
    columns = {
        "tokens/s": sampled / seconds,
        "ms a decode step": 1000 * seconds / max(responses),
        "slowest / mean rank": max(own) / (sum(own) / len(own)),
    }
    floor = generation_floor(shape, prompts, responses)
    notes = [
        f"{sampled:,} sampled tokens in {len(responses)} responses, the longest {max(responses)}; "
        f"{workload.num_prompts} prompts of {workload.prompt_length}; {shape.rollout_replicas} replica(s). Floor: "
        f"prompts read once, then operations at {shape.peak.flops / 1e9:,.0f} GFLOP/s or weights and cache at "
        f"{shape.peak.bandwidth / 1e9:,.0f} GB/s ({shape.peak.source}, all ranks); an engine's own overhead is not in "
        "it.",
    ]
    row = Row(name="generation", seconds=seconds, floor_seconds=floor, figures=columns)
    return Report(bench="rollout", work=work, rows=[row], figures={"sampled_tokens": sampled}, notes=notes)
