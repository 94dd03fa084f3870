"""The memory forecast against what a process really takes: twelve configurations, one process each, by phase.

    verl-like bench memory                 # models of 155M parameters and more, on this machine's device
    verl-like bench memory --only base bfloat16 --budget 4096

Phases: generation with the hf engine, a forward pass, and the second update, when the optimizer's states are there.
Measured as in a run (observe/memory.py); forecast: kit/forecast/memory.py.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import torch

from verl_like.algorithms.minibatch import denominators_of
from verl_like.cluster.environment import patched_environment
from verl_like.kit.bench.inputs import grouped_rows
from verl_like.kit.bench.phase import POLICY, Job, build_job, share_of_rank
from verl_like.kit.bench.ranks import on_ranks
from verl_like.kit.bench.report import Report, Row, finish
from verl_like.kit.bench.rollout import random_weights, requests_of
from verl_like.kit.bench.shapes import ModelShape, Workload
from verl_like.kit.forecast.memory import GIB, Forecast, Machine, forecast
from verl_like.models.loading import load_hf_config
from verl_like.models.memory import Shape
from verl_like.observe.memory import PhaseMemory
from verl_like.parallel.dist import ProcessInfo
from verl_like.workers.residency import Phase, Residency
from verl_like.workers.roles import ActorRole
from verl_like.workers.rollout import rollout_engine

SHAPE = ModelShape(
    hidden_size=768, num_layers=20, num_heads=12, num_kv_heads=4, intermediate_size=2048, vocab_size=32_000
)
WIDE = replace(SHAPE, hidden_size=1024, num_layers=6, num_heads=8, num_kv_heads=8, intermediate_size=4096)
LARGE_HEAD = replace(SHAPE, num_layers=8, vocab_size=100_000, tied_embeddings=False)
TINY = replace(SHAPE, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=96, vocab_size=100)
_FSDP = f"{POLICY}.actor.fsdp_config"
_KEPT = f"{POLICY}.model.enable_gradient_checkpointing=False"
_SELECTIVE = f"{POLICY}.model.recompute_granularity=selective"
CASES: dict[str, tuple[ModelShape, int, list[str]]] = {  # name -> (shape, ranks, keys)
    "base": (SHAPE, 1, []),
    "activations kept": (SHAPE, 1, [_KEPT]),
    "selective": (SHAPE, 1, [_SELECTIVE]),
    "bfloat16": (SHAPE, 1, [f"{_FSDP}.dtype=bfloat16"]),
    "bfloat16, kept": (SHAPE, 1, [f"{_FSDP}.dtype=bfloat16", _KEPT]),
    "adamw_bf16": (SHAPE, 1, [f"{POLICY}.actor.optim.optimizer=adamw_bf16"]),
    "adamw_8bit": (SHAPE, 1, [f"{POLICY}.actor.optim.optimizer=adamw_8bit"]),
    "wide": (WIDE, 1, [_KEPT]),
    "large head": (LARGE_HEAD, 1, []),
    "sleep_level=2": (SHAPE, 1, [f"{POLICY}.rollout.sleep_level=2"]),
    "LoRA": (SHAPE, 1, [f"{POLICY}.model.lora_rank=16"]),
    "two ranks": (SHAPE, 2, []),
}


_MALLOC = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}  # freed memory goes back at once


def main(arguments: argparse.Namespace) -> Report:
    """Measure every case in a process of its own; print the table."""
    rows, device = [], ""
    for name in arguments.only or CASES:
        with patched_environment(_MALLOC), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
            told, measured, device = processes.submit(case, name, arguments.budget, arguments.threads).result()
        rows += rows_of(name, told, measured)
        print(*(f"{row.name}: {row.figures}" for row in rows[-len(measured) :]), sep="\n", file=sys.stderr, flush=True)
    off = max(max(ratio, 1 / ratio) - 1 for row in rows for ratio in [row.figures["forecast / measured"]])
    notes = [
        f"GiB of one rank, the largest moment of each phase ({device}). On a CPU: growth of the resident size over the "
        f"process with its modules imported. The farthest forecast is {off:.0%} off."
    ]
    work = {"cases": [row.name for row in rows], "budget": arguments.budget, "shape": asdict(SHAPE)}
    return finish(Report(bench="memory", work=work, rows=rows, notes=notes), arguments.json, arguments.compare)


def rows_of(name: str, told: Forecast, measured: dict[str, float]) -> list[Row]:
    """A row for each phase."""
    rows = []
    for phase, gib in measured.items():
        expected = told.total(phase) / GIB
        figures = {"forecast GiB": expected, "measured GiB": gib, "forecast / measured": expected / gib}
        rows.append(Row(name=f"{name}, {phase}", figures=figures))
    return rows


def case(name: str, budget: int, threads: int | None) -> tuple[Forecast, dict[str, float], str]:
    """Run one case in a fresh process; return its forecast, the measured GiB by phase, and the device."""
    on_cuda = torch.cuda.is_available()
    ranks = 1 if on_cuda else CASES[name][1]
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(Path(folder) / "job", name, budget, on_cuda=on_cuda)
        small = job_of(Path(folder) / "tiny", name, budget, on_cuda=on_cuda, tiny=True)
        peaks = on_ranks(measure, job, small, num_ranks=ranks, device=job.device, threads=threads)
        told = told_of(job, ranks, on_cuda=on_cuda)
    largest = {phase: max(peak[phase] for peak in peaks) for phase in peaks[0]}
    return told, largest, torch.cuda.get_device_name() if on_cuda else "CPU"


def job_of(folder: Path, name: str, budget: int, *, on_cuda: bool, tiny: bool = False) -> Job:
    """A case's step, or one of a tiny model with the same keys."""
    shape, ranks, keys = CASES[name]
    length = min(240, budget // 4 - 16)
    load = Workload(
        num_prompts=max(4, 2 * budget // 1024) if on_cuda else 2,  # rows for two micro-batches
        responses_per_prompt=4,
        prompt_length=16,
        mean_response=length,
        max_response=length,
    )
    keys = [
        f"{POLICY}.actor.ppo_max_token_len_per_gpu={budget}",
        f"{POLICY}.actor.old_log_probs=recompute",
        f"{POLICY}.rollout.name=hf",
        f"{POLICY}.rollout.ignore_eos=True",
        *keys,
    ]
    shape, load = (TINY, replace(load, num_prompts=1)) if tiny else (shape, load)
    return build_job(folder, shape, load, keys, ranks=1 if on_cuda else ranks)


def told_of(job: Job, ranks: int, *, on_cuda: bool) -> Forecast:
    """Forecast the memory of a job."""
    shape = Shape.of(load_hf_config(job.spec.config.actor_rollout_ref.model), job.cost)
    return forecast(job.spec.config, shape, None, Machine(on_cpu=not on_cuda, world=ranks, capacity=None))


def measure(process: ProcessInfo, run_id: str, job: Job, small: Job) -> dict[str, float]:
    """GiB of this rank by phase. The tiny job goes first: it imports what is imported at first use."""
    work(process, run_id, small, PhaseMemory(process.device))
    gc.collect()
    memory = PhaseMemory(process.device)
    work(process, run_id, job, memory)
    return {name.rpartition("/")[2]: value for name, value in memory.take().items()}


def work(process: ProcessInfo, run_id: str, job: Job, memory: PhaseMemory) -> None:
    """The phases of a step, as the hybrid worker has them."""
    actor, engine = ActorRole(job.spec, process), rollout_engine(job.spec, process, run_id)
    discard = job.spec.config.actor_rollout_ref.rollout.sleep_level == 2
    residency = Residency([actor.engine], engine, discard=discard)
    residency.restore = lambda: engine.load_weights(random_weights(job, engine.dtype, process.device), 0)
    try:
        residency.restore()
        for phase in (Phase.rollout, Phase.train):
            residency.enter(phase)
        batch = grouped_rows(job.workload, job.spec.tokenizer_size, seed=1)
        rows, denominators = share_of_rank(job, batch, process), denominators_of(batch, job.workload.max_response)
        actor.update([(rows, denominators)])  # makes the optimizer's states
        residency.enter(Phase.rollout)
        with memory.phase("gen"):
            engine.generate(requests_of(job, process.rank, 0))
        residency.enter(Phase.train)
        with memory.phase("old_log_prob"):
            actor.log_probs(rows)
        with memory.phase("update_actor"):
            actor.update([(rows, denominators)])
    finally:
        engine.shutdown()
