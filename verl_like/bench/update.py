"""One optimizer step of the training engine alone, packed and padded, at several micro-batch sizes.

    verl-like bench update --model cpu
    verl-like bench update --model cpu --dtype bfloat16 --token-budgets 2048 4096

Rows are random; their responses end after each token with probability 1/64, at most at 128, so that most are short
and some long. The floor is 6 x parameters x tokens at the matmul rate measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from verl_like.algorithms.minibatch import denominators_of
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.batch import Experience, pad_rows
from verl_like.bench.inputs import write_model
from verl_like.bench.shapes import MODELS, WORKLOADS, Workload
from verl_like.cluster.environment import free_port
from verl_like.config import ActorConfig, FSDPConfig, ModelConfig, OptimConfig
from verl_like.config.batch_plan import MicroBatchRule
from verl_like.engine.fsdp import FSDPEngine
from verl_like.models.cost import BACKWARD, ModelCost
from verl_like.parallel.device_peak import measured_peak
from verl_like.parallel.dist import ProcessInfo, init_distributed, shutdown_distributed


def main(arguments: argparse.Namespace) -> list[dict[str, float | str]]:
    """Measure every variant, alternating between them; print and return the rows of the table."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    workload = WORKLOADS["cpu"]
    batch = mixed_rows(workload, MODELS[arguments.model].vocab_size, arguments.rows, seed=1)
    process = init_distributed(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        master_address="127.0.0.1",
        master_port=free_port(),
        device="cuda" if torch.cuda.is_available() else "cpu",
        timeout_s=600,
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), MODELS[arguments.model], workload.prompt_length + workload.max_response, seed=1)
            return compare(Path(folder), batch, process, arguments)
    finally:
        shutdown_distributed()


def compare(
    folder: Path, batch: Experience, process: ProcessInfo, arguments: argparse.Namespace
) -> list[dict[str, float | str]]:
    """Seconds of each variant in rounds, so that a change of the machine's speed meets them all."""
    variants = {
        f"{name}, {budget} tokens": (engine, micro_batches(batch, budget, packed))
        for name, packed in (("packed", True), ("padded", False))
        for engine in [build_engine(folder, process, arguments.dtype, packed)]
        for budget in arguments.token_budgets
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    rates = []
    for _ in range(arguments.rounds + 1):
        rates.append(measured_peak(process.device, torch.float32).flops)
        for name, (engine, rule) in variants.items():
            seconds[name].append(timed_step(engine, batch, rule))
    cost, tokens = ModelCost.of(next(iter(variants.values()))[0].hf_config), int(batch.num_tokens_B().sum())
    floor = 2.0 * (1 + BACKWARD) * cost.all_weights * tokens / statistics.median(rates[1:])
    rows: list[dict[str, float | str]] = []
    for name, taken in seconds.items():
        median = statistics.median(taken[1:])  # the first round warms up
        rows.append({"variant": name, "seconds": median, "to_floor": median / floor})
        print(f"{name:<24}{median:>9.3f} s{median / floor:>8.2f} x floor")
    print(
        f"{len(batch)} rows, {tokens:,} tokens, {cost.all_weights:,} parameters, {arguments.dtype}, "
        f"{torch.get_num_threads()} thread(s); float32 matmul {statistics.median(rates[1:]) / 1e9:,.0f} GFLOP/s, "
        f"floor {floor:.3f} s; medians of {arguments.rounds} rounds"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return rows


def build_engine(folder: Path, process: ProcessInfo, dtype: str, packed: bool) -> FSDPEngine:
    """The engine with its fast paths, or with padded rows and full logits, the reference path."""
    return FSDPEngine(
        kind="policy",
        process=process,
        model=ModelConfig(
            path=str(folder),
            enable_gradient_checkpointing=False,
            use_remove_padding=packed,
            use_fused_kernels=packed,
        ),
        fsdp=FSDPConfig(dtype=dtype),
        optim=OptimConfig(lr=0.0),
        grad_clip=1.0,
        num_schedule_steps=1,
    )


def micro_batches(batch: Experience, budget: int, packed: bool) -> MicroBatchRule:
    """The same budget of tokens; padded rows count with their padding."""
    width = batch.prompt_ids_BP.shape[1] + batch.response_ids_BR.shape[1]
    return MicroBatchRule(max_tokens=budget) if packed else MicroBatchRule(max_sequences=max(1, budget // width))


def timed_step(engine: FSDPEngine, batch: Experience, rule: MicroBatchRule) -> float:
    """Seconds of one optimizer step."""
    start = time.perf_counter()
    engine.train_minibatch(batch, PolicyObjective(ActorConfig()), denominators_of(batch, 1), rule=rule)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def mixed_rows(workload: Workload, vocab_size: int, num_rows: int, *, seed: int) -> Experience:
    """Rows of random tokens; a response ends after each token with probability 1/64."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [
        next((n for n in range(1, workload.max_response) if draw.random() < 1 / 64), workload.max_response)
        for _ in range(num_rows)
    ]
    responses = [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]
    prompts = torch.randint(3, vocab_size, (num_rows, workload.prompt_length), generator=generator)
    response_ids_BR = pad_rows(responses, side="right", dtype=torch.int32)
    length_B = torch.tensor(lengths)
    mask_BR = torch.arange(response_ids_BR.shape[1])[None, :] < length_B[:, None]
    return Experience(
        prompt_ids_BP=prompts.int(),
        prompt_length_B=torch.full((num_rows,), workload.prompt_length),
        response_ids_BR=response_ids_BR,
        response_length_B=length_B,
        response_mask_BR=mask_BR,
        group_B=torch.arange(num_rows) // workload.responses_per_prompt,
        advantages_BR=torch.randn(num_rows, 1, generator=generator).expand_as(mask_BR) * mask_BR,
    )
