"""The output head alone: log-prob and entropy with gradients, seconds and peak memory of each way to compute them.

    verl-like bench head                                        # 1,024 tokens x 151,936 ids x hidden 1,536
    verl-like bench head --tokens 16384 --dtype bfloat16 --ways torch triton        # CUDA

Each way runs in a process of its own. Extra memory is what comes on top of the inputs: the largest resident size of the
process on a CPU (Linux), torch.cuda.max_memory_allocated on CUDA.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_like.kit.bench.ranks import elapsed
from verl_like.kit.bench.report import Report, Row, check_comparable, finish
from verl_like.kit.bench.shapes import BenchError
from verl_like.models.fused_linear import Head, full_logits_reductions, fused_reductions
from verl_like.models.heads import dtype_of
from verl_like.observe.memory import peak_bytes, reset_peak
from verl_like.parallel.device_peak import DevicePeak, device_peak

WANT = frozenset({"log_probs", "entropy"})
WAYS = ("torch", "triton", "full logits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of the head: N tokens, V ids, H hidden."""

    tokens: int
    vocab: int
    hidden: int
    dtype: str
    threads: int | None
    rounds: int

    @property
    def flops(self) -> float:
        """Operations of one product with the head forward, two backward, a multiply and an add each."""
        return 6.0 * self.tokens * self.vocab * self.hidden

    @property
    def gradient_bytes(self) -> float:
        """Bytes that every implementation must make: the gradients of hidden states and weight, in their precision."""
        return (self.tokens + self.vocab) * self.hidden * dtype_of(self.dtype).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    seconds: float
    extra_bytes: float | None  # None where this system does not tell
    peak: DevicePeak


def main(arguments: argparse.Namespace) -> Report:
    """Measure every way, print the table."""
    on_cuda = torch.cuda.is_available()
    size = Size(
        tokens=arguments.tokens,
        vocab=arguments.vocab,
        hidden=arguments.hidden,
        dtype=arguments.dtype or ("bfloat16" if on_cuda else "float32"),
        threads=arguments.threads,
        rounds=arguments.rounds,
    )
    ways = arguments.ways or [way for way in WAYS if on_cuda or way != "triton"]
    if "triton" in ways and not on_cuda:
        raise BenchError("--ways triton needs a CUDA device: leave it out")
    work = {"tokens": size.tokens, "vocab": size.vocab, "hidden": size.hidden, "dtype": size.dtype}
    work |= {"threads": size.threads, "ways": list(ways)}
    check_comparable("head", work, arguments.compare)
    found = {way: in_own_process(way, size) for way in ways}
    return finish(report_of(size, found, work), arguments.json, arguments.compare)


def in_own_process(way: str, size: Size) -> Measured | None:
    """Measure in a fresh process; None where the memory does not suffice."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, way, size).result()


def measure(way: str, size: Size) -> Measured | None:
    """Forward and backward in rounds, after one that warms up; memory is the largest of all."""
    if size.threads is not None:
        torch.set_num_threads(size.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"device": device, "dtype": dtype_of(size.dtype)}
    weight = (0.02 * torch.randn(size.vocab, size.hidden, **options)).requires_grad_()
    hidden = torch.randn(size.tokens, size.hidden, **options).requires_grad_()
    targets = torch.randint(size.vocab, (size.tokens,), device=device)
    forward_and_backward(way, hidden[:1], weight, targets[:1])  # libraries start their threads and workspaces
    hidden.grad = weight.grad = None
    torch.cuda.empty_cache()
    before, seconds = reset_peak(device), []
    try:
        for _ in range(size.rounds + 1):
            hidden.grad = weight.grad = None
            seconds.append(elapsed(lambda: forward_and_backward(way, hidden, weight, targets), device)[0])
    except torch.OutOfMemoryError:
        return None
    peak = peak_bytes(device)
    return Measured(
        seconds=statistics.median(seconds[1:]),
        extra_bytes=None if peak is None or before is None else peak - before,
        peak=device_peak(device, hidden.dtype),
    )


def forward_and_backward(way: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Gradients of hidden states and weight, of log-probs and entropy together."""
    head = Head(weight_VH=weight)
    if way == "full logits":
        out = full_logits_reductions(hidden, head, targets, WANT)
    else:
        out = fused_reductions(hidden, head, targets, WANT, backend="triton" if way == "triton" else "torch")
    (out["log_probs"].sum() + 0.1 * out["entropy"].sum()).backward()


def report_of(size: Size, found: dict[str, Measured | None], work: dict[str, object]) -> Report:
    """Seconds against the products' operations, memory against the gradients that any way must make."""
    rows, missing = [], [way for way, measured in found.items() if measured is None]
    measured = {way: figures for way, figures in found.items() if figures is not None}
    for way, figures in measured.items():
        columns = {} if figures.extra_bytes is None else {"extra GB": figures.extra_bytes / 1e9}
        if columns:
            columns["x gradients"] = figures.extra_bytes / size.gradient_bytes if figures.extra_bytes else 0.0
        rows.append(
            Row(name=way, seconds=figures.seconds, floor_seconds=size.flops / figures.peak.flops, figures=columns)
        )
    notes = [
        f"{size.tokens:,} tokens x {size.vocab:,} ids x hidden {size.hidden:,}, {size.dtype}, log-prob and entropy "
        f"with gradients. Floor: three products with the head; one copy of the logits in float32 is "
        f"{4 * size.tokens * size.vocab / 1e9:.2f} GB, the gradients alone {size.gradient_bytes / 1e9:.2f} GB."
    ]
    notes += [f"{way}: out of memory." for way in missing]
    return Report(bench="head", work=work, rows=rows, notes=notes)
