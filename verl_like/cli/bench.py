"""`verl-like bench ...`: the options. The benchmarks themselves are imported when one runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from verl_like.bench.shapes import MODELS, WORKLOADS, BenchError


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Subcommands of `verl-like bench`."""
    benchmarks = parser.add_subparsers(required=True, metavar="BENCHMARK")

    def add(name: str, module: str, text: str, *options: Callable[[argparse.ArgumentParser], None]) -> None:
        command = benchmarks.add_parser(name, help=text)
        for option in options:
            option(command)
        command.set_defaults(run=_runner(module))

    add("grpo", "grpo", "whole GRPO steps, each phase against its floor", shape, step, files, overrides)
    add("rollout", "rollout", "generation alone, lengths forced", shape, phase, engine, files, overrides)
    add("log-prob", "log_prob", "the pass for old log-probs alone", shape, phase, files, overrides)
    add("update", "update", "one optimizer step, packed and padded", shape, phase, update, files, overrides)
    add("sync", "sync", "FSDP shards to the rollout engine, by stages", shape, phase, engine, files, overrides)


def _runner(module: str) -> Callable[[argparse.Namespace], None]:
    def run(arguments: argparse.Namespace) -> None:
        try:
            importlib.import_module(f"verl_like.bench.{module}").main(arguments)
        except BenchError as error:
            sys.exit(f"error: {error}")

    return run


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def shape(parser: argparse.ArgumentParser) -> None:
    """What is computed, and on how many processes."""
    parser.add_argument("--model", choices=sorted(MODELS), default="cpu", help="shape of the model")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="cpu", help="shape of a step")
    parser.add_argument("--ranks", type=positive, default=None, help="worker processes (default: the GPUs, or 1)")


def phase(parser: argparse.ArgumentParser) -> None:
    """The options of benchmarks of one phase."""
    parser.add_argument("--rows", type=positive, default=None, help="responses in place of the workload's")
    parser.add_argument("--rounds", type=positive, default=3, help="measured rounds, after one that warms up")
    parser.add_argument("--threads", type=positive, default=None, help="threads of a rank (default: cores / ranks)")


def engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm", help="rollout engine")


def files(parser: argparse.ArgumentParser) -> None:
    """Figures out, and earlier figures in."""
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--compare", type=Path, help="figures of an earlier run of the same work on the same hardware")


def overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", help="further keys of main_ppo, after --")


def update(parser: argparse.ArgumentParser) -> None:
    """What `bench update` varies. Checkpointing, offload and all else are keys after --."""
    parser.add_argument("--token-budgets", type=positive, nargs="+", help="of a micro-batch (default: 16384; cpu: 3)")
    parser.add_argument("--dtypes", choices=("float32", "bfloat16"), nargs="+", help="compute precisions")
    parser.add_argument("--paths", choices=("packed", "padded"), nargs="+", help="default: packed; cpu: both")


def step(parser: argparse.ArgumentParser) -> None:
    """The options of `bench grpo`."""
    parser.add_argument("--steps", type=positive, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--log-prob-pass", action="store_true", help="also time a pass for old log-probs")
    parser.add_argument("--replay", type=Path, help="JSON with the response tokens of each step: train on those")
    parser.add_argument("--rollout", type=Path, help="JSON of `bench rollout`: the generation alone, for the bar")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder for inputs and logs")
