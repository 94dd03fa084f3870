"""All benchmarks of one model and workload, one after another, each in a process of its own; one table at the end.

    verl-like bench all --model 1.5b --workload w1 --out outputs/bench/h200

Writes <out>/<benchmark>.json for each, and <out>/table.md. A benchmark that fails is named there, and the others run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from verl_like.kit.bench.report import Report
from verl_like.kit.bench.shapes import BenchError

_KEPT = "actor_rollout_ref.model.enable_gradient_checkpointing=False"
_LAST_LINES = 20  # of a failed benchmark's output, in the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One command line without its files."""

    name: str
    options: list[str]


def main(arguments: argparse.Namespace) -> None:
    """Run, print and write the table. Ends with status 1 if a benchmark failed."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    parts, failed = [f"# {arguments.model}, {arguments.workload}"], []
    for task in map(with_what_is_there, chosen(arguments)):
        print(f"== verl-like bench {' '.join(task.options)}", flush=True)
        path = out / f"{task.name}.json"
        path.unlink(missing_ok=True)
        problem = run(task, path, out / f"{task.name}.log")
        if problem is not None:
            failed.append(task.name)
        parts.append(section(task, path, problem))
        print(parts[-1], end="\n\n", flush=True)
        (out / "table.md").write_text("\n\n".join(parts) + "\n")  # after each: a broken-off run leaves a table too
    print(f"written: {out / 'table.md'}")
    if failed:
        raise BenchError(f"failed: {', '.join(failed)}; see {out}/<name>.log")


def section(task: Task, path: Path, problem: str | None) -> str:
    """A benchmark's part of the page: its table, what went wrong, or both where it broke off after its figures."""
    command = f"`verl-like bench {' '.join(task.options)}`"
    parts = [f"{command} FAILED:" if problem else command]
    parts += [Report.load(path).table()] if path.exists() else []
    parts += [f"```\n{problem}\n```"] if problem else []
    return "\n\n".join(parts)


def chosen(arguments: argparse.Namespace) -> list[Task]:
    """The tasks that are asked for, in an order in which each helps to explain the next."""
    tasks = tasks_of(arguments)
    only = arguments.only or [task.name for task in tasks]
    return [task for task in tasks if task.name in only]


def tasks_of(arguments: argparse.Namespace) -> list[Task]:
    """List all benchmarks: kernels, phases, then whole steps, which are told the generation measured alone."""
    shape = ["--model", arguments.model, "--workload", arguments.workload]
    ranks = [] if arguments.ranks is None else ["--ranks", str(arguments.ranks)]
    threads = [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    rows = [] if arguments.rows is None else ["--rows", str(arguments.rows)]
    rounds, engine = ["--rounds", str(arguments.rounds)], ["--engine", arguments.engine]
    keys = ["--", *arguments.overrides] if arguments.overrides else []
    phase = [*shape, *ranks, *threads, *rows, *rounds]
    small = arguments.model == "cpu"
    head = ["--vocab", "64", "--hidden", "256"] if small else ["--tokens", "16384"]
    attention = ["--tokens", "2048" if small else "16384"]
    tasks = [
        Task(name="packing", options=["packing", "--workloads", arguments.workload]),
        Task(name="attention", options=["attention", *shape, *attention, *rounds, *threads]),
        Task(name="head", options=["head", *head, *rounds, *threads]),
        Task(name="rollout", options=["rollout", *phase, *engine, *keys]),
        Task(name="log-prob", options=["log-prob", *phase, *keys]),
        Task(name="update", options=["update", *phase, *keys]),
        Task(name="update-kept", options=["update", *phase, "--", *arguments.overrides, _KEPT]),
        Task(name="sync", options=["sync", *phase, *engine, *keys]),
    ]
    if small:  # it keeps its activations anyway
        tasks = [task for task in tasks if task.name != "update-kept"]
    if arguments.rows is None:
        step = [*shape, *ranks, "--steps", str(arguments.rounds), "--out", str(arguments.out / "inputs")]
        alone = ["--rollout", str(arguments.out / "rollout.json")]
        alone = alone if arguments.only is None or "rollout" in arguments.only else []
        own = [f"actor_rollout_ref.rollout.name={arguments.engine}", *arguments.overrides]
        tasks.append(Task(name="grpo", options=["grpo", *step, *alone, "--", *own]))
    return tasks


def with_what_is_there(task: Task) -> Task:
    """Drop the option for the generation alone where that benchmark failed: whole steps are measured without it."""
    if "--rollout" not in task.options:
        return task
    at = task.options.index("--rollout")
    there = Path(task.options[at + 1]).exists()
    return task if there else Task(name=task.name, options=task.options[:at] + task.options[at + 2 :])


def run(task: Task, json_path: Path, log_path: Path) -> str | None:
    """Run the benchmark in a process of its own; return its last lines if it failed."""
    bench, *options = task.options
    command = [sys.executable, "-m", "verl_like.cli", "bench", bench, "--json", str(json_path), *options]
    with log_path.open("w") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if status == 0 and json_path.exists():
        return None
    last = log_path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return "\n".join([*last, f"(exit status {status})"])
