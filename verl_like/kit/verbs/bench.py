"""`verl-like bench ...`: the options. The benchmarks themselves are imported when one runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from verl_like.config.engines import OURS
from verl_like.kit.bench.shapes import MODELS, WORKLOADS, BenchError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Subcommands of `verl-like bench`."""
    benchmarks = parser.add_subparsers(required=True, metavar="BENCHMARK")

    def add(name: str, module: str, text: str, *options: Callable[[argparse.ArgumentParser], None]) -> None:
        command = benchmarks.add_parser(name, help=text)
        for option in options:
            option(command)
        command.set_defaults(run=_runner(module))

    add("grpo", "grpo", "whole GRPO steps, each phase against its floor", shape, step, files, overrides)
    add("rollout", "rollout", "generation alone, lengths forced", shape, phase, engine, engines, files, overrides)
    add("log-prob", "log_prob", "the pass for old log-probs alone", shape, phase, files, overrides)
    add("update", "update", "one optimizer step, packed and padded", shape, phase, update, files, overrides)
    add("sync", "sync", "FSDP shards to the rollout engine, by stages", shape, phase, engine, channel, files, overrides)
    add("head", "head", "log-prob and entropy from hidden states: seconds and memory", head, kernel, files)
    add("attention", "attention", "packed attention against padded rows", sequences, kernel, files)
    add("memory", "memory", "the memory forecast beside measured peaks, ten configurations", memory, files)
    add("agents", "agents", "conversations with a slow tool, beside the longest alone", agents, files, overrides)
    add("gateway", "gateway", "what a request over the gateway costs the driver", gateway, files)
    add("serve", "serve", "ten clients of the Tinker server beside one with the same work", serve, files, overrides)
    add("driver", "driver", "the driver's own work of a step, without models", driver, files)
    add("learn", "learn", "time to an accuracy: GRPO, distillation, SFT from one start", learn, files, overrides)
    add("packing", "packing", "how full micro-batches are", packing, files)
    add("mesh", "mesh", "bytes, bubbles and drops of every axis of the mesh, by the least", mesh, files)
    every = (shape, phase, engine, series, overrides)
    add("all", "everything", "all of these for one model and workload, one table", *every)


def _runner(module: str) -> Callable[[argparse.Namespace], None]:
    def run(arguments: argparse.Namespace) -> None:
        try:
            if vars(arguments).get("compare"):  # before minutes are spent
                importlib.import_module("verl_like.kit.bench.report").Report.load(arguments.compare)
            importlib.import_module(f"verl_like.kit.bench.{module}").main(arguments)
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
    """Add the options for the model, the workload and the number of processes."""
    parser.add_argument("--model", choices=sorted(MODELS), default="cpu", help="shape of the model")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="cpu", help="shape of a step")
    parser.add_argument("--ranks", type=positive, default=None, help="worker processes (default: the GPUs, or 1)")


def phase(parser: argparse.ArgumentParser) -> None:
    """The options of benchmarks of one phase."""
    parser.add_argument("--rows", type=positive, default=None, help="responses in place of the workload's")
    parser.add_argument("--rounds", type=positive, default=3, help="measured rounds, after one that warms up")
    parser.add_argument("--threads", type=positive, default=None, help="threads of a rank (default: cores / ranks)")


def engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=OURS, default="vllm", help="rollout engine")


def engines(parser: argparse.ArgumentParser) -> None:
    """Add the options for several engines and workloads in one table."""
    parser.add_argument("--engines", choices=OURS, nargs="+", help="several, one after another")
    parser.add_argument("--workloads", choices=sorted(WORKLOADS), nargs="+", help="several, each with every engine")


def channel(parser: argparse.ArgumentParser) -> None:
    every, text = ("inproc", "ipc", "broadcast"), "to an engine in the same process, beside it, or anywhere"
    parser.add_argument("--channel", choices=every, default="inproc", help=text)


def files(parser: argparse.ArgumentParser) -> None:
    """Figures out, and earlier figures in."""
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--compare", type=Path, help="figures of an earlier run of the same work on the same hardware")


def overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", help="further keys of main_ppo, after --")


def update(parser: argparse.ArgumentParser) -> None:
    """Add the variants of `bench update`. Checkpointing, offload and all else are keys after --."""
    parser.add_argument("--token-budgets", type=positive, nargs="+", help="of a micro-batch (default: 16384; cpu: 3)")
    parser.add_argument("--dtypes", choices=("float32", "bfloat16"), nargs="+", help="compute precisions")
    parser.add_argument(
        "--paths", choices=("packed", "unshared", "padded"), nargs="+", help="default: packed; cpu: + padded"
    )
    text = "agents: forks of each prompt, and the turns of each fork, a row for each turn with all that came before"
    parser.add_argument("--agents", type=positive, nargs=2, metavar=("FORKS", "TURNS"), help=text)


def step(parser: argparse.ArgumentParser) -> None:
    """The options of `bench grpo`."""
    parser.add_argument("--steps", type=positive, default=5, help="measured steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--log-prob-pass", action="store_true", help="also time a pass for old log-probs")
    parser.add_argument("--replay", type=Path, help="JSON with the response tokens of each step: train on those")
    parser.add_argument("--rollout", type=Path, help="JSON of `bench rollout`: the generation alone, for the bar")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder for inputs and logs")


def learn(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench learn`."""
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="data, warm start and run of each (1 2 3)"
    )
    parser.add_argument("--steps", type=positive, default=150, help="steps of GRPO, and of others at most (150)")
    parser.add_argument("--every", type=positive, default=5, help="steps between two tests (5)")
    parser.add_argument("--share", type=float, default=0.9, help="target, as a share of the teacher's accuracy (0.9)")
    parser.add_argument("--teacher", type=Path, help="trained model of the same seed's quickstart (default: train it)")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench/learn"), help="folder for data and runs")


def head(parser: argparse.ArgumentParser) -> None:
    """The size of the output head."""
    parser.add_argument("--tokens", type=positive, default=1024)
    parser.add_argument("--vocab", type=positive, default=151_936, help="ids")
    parser.add_argument("--hidden", type=positive, default=1536)
    parser.add_argument("--ways", choices=("torch", "triton", "full logits"), nargs="+", help="default: all there are")


def sequences(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(MODELS), default="cpu", help="shape of the heads")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="cpu", help="lengths of the sequences")
    parser.add_argument("--tokens", type=positive, default=2048, help="of the micro-batch")


def kernel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on CUDA, else float32")
    parser.add_argument("--rounds", type=positive, default=3, help="measured rounds, after one that warms up")
    parser.add_argument("--threads", type=positive, default=None, help="threads (default: torch's)")


def packing(parser: argparse.ArgumentParser) -> None:
    every = sorted(WORKLOADS)
    parser.add_argument("--workloads", choices=every, nargs="+", default=every)
    parser.add_argument("--budgets", type=positive, nargs="+", default=[8192, 16384, 32768], help="tokens")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2, 8])


def agents(parser: argparse.ArgumentParser) -> None:
    """The conversations, and what answers them."""
    parser.add_argument("--engine", choices=("fake", "vllm", "hf"), default="fake", help="fake: simulated time")
    parser.add_argument("--model", choices=sorted(MODELS), default="cpu", help="shape of a real engine's model")
    parser.add_argument("--episodes", type=positive, default=500, help="at once")
    parser.add_argument("--turns", type=positive, default=5, help="of each; a tool call after all but the last")
    parser.add_argument("--tokens", type=positive, default=32, help="of a turn, mean")
    parser.add_argument("--tool-ms", type=positive, default=200, help="of one call")
    parser.add_argument("--replicas", type=positive, default=8, help="simulated ones")
    parser.add_argument("--rounds", type=positive, default=3, help="measured rounds, after one that warms up")
    parser.add_argument("--threads", type=positive, default=None, help="threads of a real engine (default: all cores)")


def gateway(parser: argparse.ArgumentParser) -> None:
    """The sessions that ask."""
    parser.add_argument("--sessions", type=positive, default=200, help="at once")
    parser.add_argument("--turns", type=positive, default=5, help="requests of each, one after the other")
    parser.add_argument("--hostile-s", type=positive, default=25, help="seconds for which a hostile client waits")


def serve(parser: argparse.ArgumentParser) -> None:
    """The clients, and a round of each."""
    parser.add_argument("--model", choices=sorted(MODELS), default="cpu", help="shape of the base")
    parser.add_argument("--clients", type=positive, default=10, help="at once, each with a model of its own")
    parser.add_argument("--rows", type=positive, default=4, help="of a client's pass, and its samples")
    parser.add_argument("--length", type=positive, default=128, help="tokens of a row")
    parser.add_argument("--tokens", type=positive, default=32, help="of a sample")
    parser.add_argument("--rank", type=positive, default=16, help="of the adapters")
    parser.add_argument("--rounds", type=positive, default=3, help="measured rounds, after one that warms up")
    parser.add_argument("--threads", type=positive, default=None, help="threads (default: torch's)")


def driver(parser: argparse.ArgumentParser) -> None:
    """The batch that passes through the driver."""
    parser.add_argument("--prompts", type=positive, default=1024)
    parser.add_argument("--n", type=positive, default=8, help="responses to each")
    parser.add_argument("--mean", type=positive, default=2300, help="tokens of a response")
    parser.add_argument("--longest", type=positive, default=4096, help="tokens")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=1, help="of torch")
    parser.add_argument("--most-copies", type=float, help="a further bar: the step, in copies of the batch")


def memory(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the cases, and the micro-batch of all."""
    parser.add_argument("--only", nargs="+", help="some of the cases")
    parser.add_argument("--budget", type=positive, default=1024, help="tokens of a micro-batch")
    parser.add_argument("--threads", type=positive, default=None, help="threads of a rank (default: all cores)")


def mesh(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the meshes."""
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="processes (2)")
    parser.add_argument("--only", nargs="+", metavar="MESH", help="some of the meshes")
    parser.add_argument("--threads", type=positive, default=None, help="threads of a rank (default: cores / ranks)")


def series(parser: argparse.ArgumentParser) -> None:
    """The options of `bench all`."""
    every = ("packing", "attention", "head", "rollout", "log-prob", "update", "update-kept", "sync", "grpo")
    parser.add_argument("--only", choices=every, nargs="+", help="some of them (default: all; with --rows: no grpo)")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench/all"), help="folder for figures and table.md")
