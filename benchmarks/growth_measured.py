"""The measured half of growth.py: one optimizer step on a small shape, each size doubled, then doubled again."""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from verl_like.algorithms.minibatch import denominators_of
from verl_like.kit.bench.inputs import grouped_rows
from verl_like.kit.bench.phase import POLICY, Job, build_job
from verl_like.kit.bench.ranks import on_ranks, timed
from verl_like.kit.bench.report import Report, Row, check_comparable
from verl_like.kit.bench.shapes import ModelShape, Workload
from verl_like.models.cost import BACKWARD
from verl_like.parallel.device_peak import device_peak
from verl_like.parallel.dist import ProcessInfo
from verl_like.workers.roles import ActorRole

SHAPE = ModelShape(
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=384,
    vocab_size=1024,
    tied_embeddings=True,
)
LOAD = Workload(num_prompts=4, responses_per_prompt=8, prompt_length=16, mean_response=112, max_response=224)
BASE = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One point: a model and a batch."""

    shape: ModelShape
    workload: Workload


def sizes(factors: tuple[int, ...] = (2, 4)) -> dict[str, Size]:
    """The base, and each of sequence length, batch, width and depth times the factors, the others as they are."""
    found = {BASE: Size(shape=SHAPE, workload=LOAD)}
    for k in factors:
        longer = replace(
            LOAD,
            num_prompts=LOAD.num_prompts // k,
            prompt_length=LOAD.prompt_length * k,
            mean_response=(LOAD.mean_response or 0) * k,
            max_response=LOAD.max_response * k,
        )
        found[f"sequences x {k}, as many tokens"] = Size(shape=SHAPE, workload=longer)
        found[f"rows x {k}"] = Size(shape=SHAPE, workload=replace(LOAD, num_prompts=LOAD.num_prompts * k))
        found[f"width x {k}"] = Size(shape=wider(SHAPE, k), workload=LOAD)
        found[f"layers x {k}"] = Size(shape=replace(SHAPE, num_layers=SHAPE.num_layers * k), workload=LOAD)
    return found


def wider(shape: ModelShape, k: int) -> ModelShape:
    """k times the width, with k times the heads of the same size."""
    return replace(
        shape,
        hidden_size=shape.hidden_size * k,
        intermediate_size=shape.intermediate_size * k,
        num_heads=shape.num_heads * k,
        num_kv_heads=shape.num_kv_heads * k,
    )


def measured(arguments: argparse.Namespace) -> Report:
    """Seconds of an optimizer step at every size, in turns, next to what the operations alone would grow by."""
    points = sizes()
    work = {"sizes": {name: asdict(size) for name, size in points.items()}, "threads": arguments.threads}
    check_comparable("growth, measured", work, arguments.compare)
    with tempfile.TemporaryDirectory() as folder:
        jobs = {
            name: build_job(Path(folder) / str(number), size.shape, size.workload, _keys(), ranks=1)
            for number, (name, size) in enumerate(points.items())
        }
        options = {"num_ranks": 1, "device": jobs[BASE].device, "threads": arguments.threads}
        ((seconds, rates),) = on_ranks(measure, jobs, arguments.rounds, **options)
    fastest = {name: min(wall for wall, _ in taken[1:]) for name, taken in seconds.items()}
    effort = {name: min(own for _, own in taken[1:]) for name, taken in seconds.items()}
    flops = {name: operations(job) for name, job in jobs.items()}
    rows = [
        Row(
            name=name,
            seconds=fastest[name],
            floor_seconds=flops[name] / max(rates),
            figures={
                "grew": effort[name] / effort[BASE],
                "operations grew": flops[name] / flops[BASE],
            },
        )
        for name in jobs
    ]
    notes = [
        f"One optimizer step, packed, one process, the sizes in turns. Base: hidden {SHAPE.hidden_size}, "
        f"{SHAPE.num_layers} layers, {LOAD.num_prompts} prompts x {LOAD.responses_per_prompt} of {LOAD.prompt_length} "
        f"+ {LOAD.mean_response} tokens. Seconds: the fastest round. Floor: operations at the best measured rate "
        "of matrix products. grew: by the base, in processor seconds on a CPU (other programs do not enter them), next "
        "to the growth of the operations."
    ]
    return Report(bench="growth, measured", work=work, rows=rows, notes=notes)


def _keys() -> list[str]:
    return [f"{POLICY}.actor.optim.lr=0", f"{POLICY}.model.enable_gradient_checkpointing=False"]


def operations(job: Job) -> float:
    """Of one optimizer step's forward and backward pass."""
    responses = job.workload.response_lengths(seed=1)
    lengths = [job.workload.prompt_length + n for n in responses]
    return (1 + BACKWARD) * job.cost.forward_flops(lengths, sum(responses))


def measure(
    process: ProcessInfo, run_id: str, jobs: dict[str, Job], num_rounds: int
) -> tuple[dict[str, list[tuple[float, float]]], list[float]]:
    """(Seconds, this process's own processor seconds) by size and round, and the rate of matrix products in each round.
    On a GPU both are seconds."""
    actors = {name: ActorRole(job.spec, process) for name, job in jobs.items()}
    batches = {name: grouped_rows(job.workload, job.spec.tokenizer_size, seed=1) for name, job in jobs.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    rates = []
    for _ in range(num_rounds + 1):
        rates.append(device_peak(process.device, actors[BASE].engine.compute_dtype).flops)
        for name, actor in actors.items():
            rows = batches[name]
            work = partial(actor.update, [(rows, denominators_of(rows, jobs[name].workload.max_response))])
            before = time.process_time()
            taken = timed(work, process.device)[0]
            own = time.process_time() - before
            seconds[name].append((taken, own if process.device.type == "cpu" else taken))
    return seconds, rates
