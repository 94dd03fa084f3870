"""What only a card can tell, once: docs/gpu_checks.md and the pieces of `make gpu-report` are made of this table.

A row is a claim, a command, what to expect, and minutes on one H100 or H200 (estimates: none has run yet). Rows
stand in the order in which they run: in this order a failure explains those after it, and the first 25 minutes tell
the most.
Expected figures are computed: by the memory forecast and the operations of `python -m benchmarks.growth --gpu H200`
(tests/unit/docs/test_gpu_checks.py computes them again), or they are targets of the project (kit/bench/bars.py).
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from verl_like.kit.bench.bars import MFU, SERVED, STEP_TO_TARGET, SYNC_SECONDS

PIECE_MINUTES = 8.0
FIRST_MINUTES = 25.0
_NUMBER = r"(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)"


@dataclass(frozen=True)
class Expect:
    """One figure. Exactly one of `most`, `least` and `about` (with `within`, its share) is given.

    name: for people.
    row, column: of a benchmark's JSON: an expression for the beginning of row names (the best of several counts, the
        farthest off with `about`), and a column, `seconds` included; no row: one of the figures beside the rows; or
    text: a regular expression with one group, in what the command printed (the largest of several counts).
    """

    name: str
    row: str = ""
    column: str = ""
    text: str = ""
    most: float | None = None
    least: float | None = None
    about: float | None = None
    within: float = 0.15

    def __str__(self) -> str:
        if self.about is not None:
            return f"{self.name}: {self.about:g} within {self.within:.0%}"
        return f"{self.name}: at {f'most {self.most:g}' if self.most is not None else f'least {self.least:g}'}"

    def holds(self, value: float) -> bool:
        """Whether a measured figure is what was expected."""
        if self.about is not None:
            return abs(value - self.about) <= self.within * self.about
        return value <= self.most if self.most is not None else value >= (self.least or 0.0)

    def measured(self, printed: str, figures: Path) -> float | None:
        """Read the figure out of what a command left; None where it is not there."""
        if self.text:
            found = [float(value) for value in re.findall(self.text, printed)]
            return max(found) if found else None
        if not figures.exists():
            return None
        told = json.loads(figures.read_text())
        rows = [row | row["figures"] for row in told["rows"] if self.row and re.match(self.row, row["name"])]
        values = [row.get(self.column) for row in rows] if self.row else [told["figures"].get(self.column)]
        there = [float(value) for value in values if value is not None]
        best = max if self.least is not None else min if self.most is not None else self._farthest
        return best(there) if there else None

    def _farthest(self, values: list[float]) -> float:
        return max(values, key=lambda value: abs(value - (self.about or 0.0)))


@dataclass(frozen=True)
class Check:
    """One row. command: words after `python`; {json} is the file of a benchmark's figures.

    needs: packages without which it is left out. devices: of which it needs so many.
    """

    name: str
    claim: str
    command: str
    minutes: float
    expects: tuple[Expect, ...] = ()
    needs: tuple[str, ...] = ()
    devices: int = 1

    @property
    def shown(self) -> str:
        """The command as one types it."""
        words = self.command.replace(" --json {json}", "")
        return (
            words.removeprefix("-m ").replace("verl_like.cli", "verl-like")
            if words.startswith("-m ")
            else (f"python {words}")
        )

    def words(self, figures: Path) -> list[str]:
        """The command with this Python."""
        return [sys.executable, *self.command.format(json=figures).split()]


def gpu_tests(*names: str) -> str:
    """Command of files of tests/gpu."""
    return "-m pytest -m gpu -q -s " + " ".join(f"tests/gpu/test_{name}_gpu.py" for name in names)


def bench(options: str) -> str:
    """Command of `verl-like bench`."""
    return f"-m verl_like.cli bench {options} --json {{json}}"


UPDATE_SECONDS, UPDATE_GB = 4.06, 29.6  # of 1.5B on W1: at 40% of 989 TFLOP/s; at a budget of 16,384 tokens
_UPDATE = "update --model 1.5b --workload w1 --paths packed --dtypes bfloat16 --token-budgets 16384"
_MFU = Expect("MFU, every trained token counted", row="packed, bfloat16", column="MFU", least=MFU)
_SYNC = Expect("seconds, with the proof", row="with the proof", column="seconds", most=SYNC_SECONDS)
CHECKS: tuple[Check, ...] = (
    Check("doctor", "Driver, torch and the packages fit each other.", "-m verl_like.cli doctor", 0.5),
    Check(
        "attention",
        "The attention kernels of this torch (or FlashAttention) give the right values and gradients.",
        gpu_tests("attention"),
        1.0,
    ),
    Check(
        "fused-head",
        "The Triton head equals torch's, and the head of 152k ids stays under 2 GB.",
        gpu_tests("fused_triton"),
        1.0,
        (
            Expect("GB, Triton", text=rf"triton: {_NUMBER} GB", most=2.0),
            Expect("GB, torch", text=rf"torch: {_NUMBER} GB", most=2.0),
        ),
    ),
    Check(
        "train-engine",
        "The engine trains in bfloat16, recomputes, compiles, offloads, saves and resumes.",
        gpu_tests("train_engine"),
        3.0,
    ),
    Check(
        "memory",
        "Shards and LoRA come back from host memory; 1.5B trains in full within 24 GB.",
        gpu_tests("memory"),
        2.0,
        (Expect("GB, peak of 1.5B", text=rf"peak {_NUMBER} GB", most=24.0),),
    ),
    Check(
        "update",
        "The update of 1.5B reaches 40% of the peak, and its memory is what was forecast.",
        bench(_UPDATE),
        3.5,
        (
            _MFU,
            Expect("seconds", row="packed, bfloat16", column="seconds", most=UPDATE_SECONDS),
            Expect("GB, peak", row="packed, bfloat16", column="peak GB", about=UPDATE_GB),
        ),
    ),
    Check(
        "log-prob",
        "The pass for log-probs of 1.5B reaches 40% of the peak.",
        bench("log-prob --model 1.5b --workload w1"),
        2.0,
        (Expect("MFU", row="log-probs", column="MFU", least=MFU),),
    ),
    Check(
        "head",
        "The head of 16k tokens, forward and backward: the Triton kernels against torch, and their memory.",
        bench("head --tokens 16384 --ways torch triton"),
        2.0,
        (Expect("GB above the inputs, Triton", row="triton", column="extra GB", most=2.0),),
    ),
    Check(
        "rollout",
        "vLLM takes weights, sleeps (level 2 too) and wakes, also under requests; all its names are there; FIRE works.",
        gpu_tests("rollout"),
        4.0,
        needs=("vllm",),
    ),
    Check(
        "main-job",
        "The whole job runs at 0.5B, offloaded too, with tools, and with requests that come and are aborted.",
        gpu_tests("main_job"),
        4.0,
        needs=("vllm",),
    ),
    Check(
        "sync",
        "Weights of 1.5B reach vLLM in the same process, with their proof, within 0.15 s.",
        bench("sync --model 1.5b --workload w1"),
        2.0,
        (_SYNC,),
        needs=("vllm",),
    ),
    Check(
        "router-replay",
        "vLLM's own flag returns the routes of every token, of cached prompts and under CUDA graphs too; replayed, the "
        "trainer's log-probs come nearer to vLLM's.",
        gpu_tests("router_replay"),
        3.0,
        (Expect("difference, replayed by live", text=rf"replayed / live: {_NUMBER}", most=1.0),),
        needs=("vllm",),
    ),
    Check(
        "memory-forecast",
        "The memory forecast is within 15% of max_memory_allocated in every phase.",
        gpu_tests("memory_forecast"),
        4.0,
    ),
    Check(
        "ragged",
        "Flat columns and their padded forms on a device are what they are on a CPU.",
        gpu_tests("ragged"),
        0.5,
    ),
    Check(
        "liger",
        "Liger's kernels give the values and gradients of ours.",
        gpu_tests("liger"),
        2.0,
        needs=("liger_kernel",),
    ),
    Check(
        "generation",
        "Generation of 1.5B on W1 against its floor.",
        bench("rollout --model 1.5b --workload w1"),
        3.0,
        (Expect("seconds: 512 decode steps of 6 ms", row="generation", column="seconds", most=3.0),),
        needs=("vllm",),
    ),
    Check(
        "engines",
        "vLLM quantises to fp8 at each sync, proved; a wrong scale is caught; n-gram proposals leave the distribution "
        "alone; the engines' own servers answer.",
        gpu_tests("engines"),
        6.0,
        needs=("vllm",),
    ),
    Check(
        "step",
        "A whole step of 1.5B on W1, within 1.3 of generation and update at 40% of the peak.",
        bench("grpo --model 1.5b --workload w1 --steps 3"),
        6.0,
        (
            Expect("by (its generation + 8PT at 40%)", column="step_to_target", most=STEP_TO_TARGET),
            Expect("MFU of the update", column="mfu_update", least=MFU),
            Expect("seconds of the weight sync", column="sync_seconds", most=SYNC_SECONDS),
        ),
        needs=("vllm",),
    ),
    Check(
        "weight-channels",
        "Weights reach an engine in another process by CUDA handles (with two devices: by NCCL), a fault is named.",
        gpu_tests("weight_channels"),
        3.0,
        needs=("vllm",),
    ),
    Check(
        "sync-ipc",
        "CUDA handles to an engine beside the trainer: no slower than in one process by half.",
        bench("sync --channel ipc --model 1.5b --workload w1"),
        2.5,
        (Expect("seconds, with the proof", row="with the proof", column="seconds", most=1.5 * SYNC_SECONDS),),
        needs=("vllm",),
    ),
    Check(
        "sync-broadcast",
        "NCCL's broadcast to an engine in a process of its own.",
        bench("sync --channel broadcast --model 1.5b --workload w1 --ranks 1"),
        2.5,
        needs=("vllm",),
        devices=2,
    ),
    Check(
        "vision",
        "Trainer and engines see images and videos as a CPU does, with gradients in both towers, also after sleep.",
        gpu_tests("vision"),
        5.0,
        needs=("vllm",),
    ),
    Check(
        "async",
        "Requests survive the engine's sleep between two versions, and on a device of their own.",
        gpu_tests("async"),
        4.0,
        needs=("vllm",),
    ),
    Check(
        "replay",
        "A recorded step is made again on the device, to the last bit with trainer.full_determinism.",
        gpu_tests("replay"),
        3.0,
    ),
    Check(
        "pools",
        "vLLM on a device of its own gets its weights by NCCL; the critic is at home on a third.",
        gpu_tests("pools"),
        4.0,
        needs=("vllm",),
        devices=2,
    ),
    Check(
        "memory-cases",
        "The forecast beside measured peaks, for twelve configurations of 150M parameters.",
        bench("memory --budget 16384"),
        7.0,
        (Expect("forecast / measured, the farthest off", row=".", column="forecast / measured", about=1.0),),
    ),
    Check(
        "update-kept",
        "Without checkpointing the update of 1.5B fits, and is faster than with it.",
        bench(_UPDATE) + " -- actor_rollout_ref.model.enable_gradient_checkpointing=False",
        3.5,
        (_MFU,),
    ),
    Check(
        "trees",
        "Turns of agents that begin alike are computed once: the update of 4 forks of 6 turns, shared and apart.",
        bench(
            "update --model 0.5b --workload w1 --rows 192 --agents 4 6 --paths packed unshared --dtypes bfloat16 "
            "--token-budgets 16384"
        ),
        2.5,
    ),
    Check(
        "context",
        "Two devices share rows by chunks of their tokens, with NCCL: the update of 1.5B.",
        bench(_UPDATE + " --ranks 2") + " -- actor_rollout_ref.actor.fsdp_config.context_parallel_size=2",
        3.5,
        devices=2,
    ),
    Check(
        "attention-speed",
        "One layer's attention, packed, against padded rows with a mask.",
        bench("attention --model 1.5b --workload w1 --tokens 16384"),
        1.0,
    ),
    Check("driver", "The driver's own work of a step beside a device.", bench("driver"), 1.5),
    Check(
        "serve",
        "The server's passes that models share give each what it gets alone, twice the same bits.",
        gpu_tests("tinker_server"),
        1.0,
    ),
    Check(
        "serve-speed",
        "Ten clients of the server who share passes, beside one with the same work.",
        bench("serve --model 0.5b --rows 8 --length 512 --tokens 64"),
        3.0,
        (Expect("of one client's tokens a second", column="of_one", least=SERVED),),
    ),
    Check(
        "guesses",
        "Tokens that are guessed ahead change no token of the hf engine.",
        gpu_tests("drafts"),
        1.0,
    ),
    Check(
        "guesses-vllm",
        "Tokens that are guessed ahead keep the distribution of vLLM's samples.",
        gpu_tests("vllm_drafts"),
        1.0,
    ),
    Check(
        "guesses-speed",
        "Guesses from history pay on a device for more rows than on a CPU (seconds of each epoch are printed).",
        "benchmarks/drafts.py --device cuda --prompts 8 --n 8 --repeat",
        2.0,
    ),
    Check(
        "pieces",
        "Stages of a pipeline wait less in two pieces, or with zero bubble, and send the bytes of the least.",
        bench("mesh --ranks 2 --only pipe pipe-virtual pipe-zero-bubble"),
        2.0,
        devices=2,
    ),
    Check(
        "agents",
        "500 conversations with a slow tool keep vLLM busy.",
        bench("agents --engine vllm --model 0.5b"),
        5.0,
        needs=("vllm",),
    ),
    Check(
        "quickstart-data",
        "The tiny model and data that the next row reads are made.",
        "recipes/quickstart/prepare.py",
        0.5,
    ),
    Check(
        "asynchronous",
        "Training and sampling at once are faster than in turns.",
        "benchmarks/asynchronous.py --rounds 3",
        6.0,
        needs=("vllm",),
    ),
)


def pieces(checks: tuple[Check, ...] = CHECKS, minutes: float = PIECE_MINUTES) -> list[list[Check]]:
    """Cut the table into runs of rows that take so many minutes together at most; the order stays."""
    found: list[list[Check]] = []
    for check in checks:
        if not found or sum(each.minutes for each in found[-1]) + check.minutes > minutes:
            found.append([])
        found[-1].append(check)
    return found


def page(checks: tuple[Check, ...] = CHECKS) -> str:
    """The whole of docs/gpu_checks.md."""
    lines = [
        "# What only a card can tell",
        "",
        "Generated by `python -m tests.gpu.report --page` from `tests/gpu/checks.py`; do not edit by hand.",
        "",
        "No GPU was at hand where this was written. What can be shown without one is shown by tests: kernels compiled",
        "ahead, names in the GPU wheels of the engines (`make twin-wheels`), CUDA branches on a stand-in. Speed, real",
        "memory, NCCL, FP8, the numerics of kernels and drivers are left, one command each.",
        "",
        "    make gpu-report                        # all of it, in pieces of at most "
        f"{PIECE_MINUTES:g} minutes; run again: goes on",
        '    make gpu-report ARGS="--pieces 1"      # one piece, where a command may not run long',
        '    make gpu-report ARGS="--only sync step --again"',
        "",
        f"The first {FIRST_MINUTES:g} minutes tell the most. At the end `outputs/gpu/table.md` sets expected beside",
        "measured and says what was left out (a package or devices are missing); each command's output is beside it.",
        "Minutes are estimates for one H100 or H200; MFU and seconds are of the data sheet's 989 TFLOP/s.",
        "",
    ]
    for number, piece in enumerate(pieces(checks), 1):
        total = sum(check.minutes for check in piece)
        lines += [
            f"## Piece {number}: {total:g} minutes",
            "",
            "| claim | command | expect | minutes |",
            "|---|---|---|---|",
        ]
        for check in piece:
            expects = "; ".join(map(str, check.expects)) or "it passes"
            more = f" ({check.devices} devices)" if check.devices > 1 else ""
            lines.append(f"| {check.claim}{more} | `{check.shown}` | {expects} | {check.minutes:g} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"
