"""`verl-like bench ...`: the options. The benchmarks themselves are imported when one runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_like.bench.shapes import MODELS, WORKLOADS


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Subcommands of `verl-like bench`."""
    benchmarks = parser.add_subparsers(required=True, metavar="BENCHMARK")
    grpo = benchmarks.add_parser("grpo", help="whole GRPO steps, each phase against its floor")
    add_grpo_arguments(grpo)
    grpo.set_defaults(run=run_grpo)
    update = benchmarks.add_parser("update", help="one optimizer step of the engine alone, packed and padded")
    add_update_arguments(update)
    update.set_defaults(run=run_update)


def run_grpo(arguments: argparse.Namespace) -> None:
    from verl_like.bench import grpo

    grpo.main(arguments)


def run_update(arguments: argparse.Namespace) -> None:
    from verl_like.bench import update

    update.main(arguments)


def add_update_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `verl-like bench update`."""
    parser.add_argument("--model", choices=sorted(MODELS), default="cpu", help="shape of the model")
    parser.add_argument("--rows", type=int, default=256, help="rows of the mini-batch")
    parser.add_argument("--token-budgets", type=int, nargs="+", default=[2048, 4096, 16384], help="of a micro-batch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="compute precision")
    parser.add_argument("--threads", type=int, default=None, help="torch's threads")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds over all variants")
    parser.add_argument("--json", type=Path, help="write the figures here")


def add_grpo_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `verl-like bench grpo`."""
    parser.add_argument("--model", choices=sorted(MODELS), default="cpu", help="shape of the model")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="cpu", help="shape of a step")
    parser.add_argument("--ranks", type=int, default=None, help="worker processes (default: the GPUs, or 1)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--log-prob-pass", action="store_true", help="also time a pass for old log-probs")
    parser.add_argument("--replay", type=Path, help="JSON with the response tokens of each step: train on those")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder for inputs and logs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--compare", type=Path, help="figures of an earlier run")
    parser.add_argument("overrides", nargs="*", help="further keys of main_ppo")
