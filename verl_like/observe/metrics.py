"""Metrics of a step that belong to no algorithm: lengths, throughput, memory, load balance, and each data source's.

Pure functions from a stage struct to `{name: number}` under verl's names; docs/metrics.md says what each one means.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from verl_like.batch import Episodes, Rollouts, Scores, whole_episodes
from verl_like.flat_columns import bounds

_GIB = 1024**3


def rollout_metrics(rollouts: Rollouts, max_prompt_length: int) -> dict[str, float]:
    """Compute `response_length/*`, `prompt_length/*` (tokens) and `response/*` of a batch of responses.

    response_length/clip_ratio is the share of responses that were cut off, by their finish reason: one whose end token
    is its last possible one is whole. prompt_length/clip_ratio: of prompts that have the longest length. An episode of
    several rows is one response, to the prompt of its first row.
    """
    rollouts = Episodes.of(rollouts).join(rollouts)
    ends = zip(rollouts.finish_reasons, rollouts.response_length_B.tolist(), strict=True)
    aborted = [reason == "abort" or length == 0 for reason, length in ends]
    return {
        **_length_metrics("response_length", rollouts.response_length_B, rollouts.cut_off_B),
        **_length_metrics("prompt_length", rollouts.prompt_length_B, rollouts.prompt_length_B >= max_prompt_length),
        "response/aborted_ratio": sum(aborted) / len(aborted),
        "response/duplicate_fraction": duplicate_fraction(rollouts),
    }


def duplicate_fraction(rollouts: Rollouts) -> float:
    """Share of the responses that equal an earlier one of their group, token for token."""
    ids, groups = rollouts.response_ids_T.numpy(), rollouts.group_B.tolist()
    places = itertools.pairwise(bounds(rollouts.response_length_B))
    different = {(group, ids[start:stop].tobytes()) for group, (start, stop) in zip(groups, places, strict=True)}
    return 1 - len(different) / len(groups)


def _length_metrics(prefix: str, length_B: Tensor, clipped_B: Tensor) -> dict[str, float]:
    length = length_B.double()
    return {
        f"{prefix}/mean": length.mean().item(),
        f"{prefix}/max": length.max().item(),
        f"{prefix}/min": length.min().item(),
        f"{prefix}/clip_ratio": clipped_B.double().mean().item(),
    }


def perf_metrics(total_tokens: int, step_seconds: float, num_devices: int) -> dict[str, float]:
    """Throughput of a whole step. `total_tokens`: prompt + response tokens over all rows and ranks."""
    return {
        "perf/total_num_tokens": float(total_tokens),
        "perf/time_per_step": step_seconds,
        "perf/throughput": total_tokens / (step_seconds * num_devices),
    }


def memory_metrics() -> dict[str, float]:
    """Peak device memory of this process and memory used on this machine, in GiB. Call it in each worker; join by max.

    Device numbers are there only if this process used CUDA; the machine's only on Linux.
    """
    metrics: dict[str, float] = {}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / _GIB
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / _GIB
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        metrics["perf/memory_used_fraction"] = torch.cuda.max_memory_reserved() / total
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        used, total = memory_gib(meminfo.read_text())
        metrics["perf/cpu_memory_used_gb"] = used
        metrics.setdefault("perf/memory_used_fraction", used / total)
    return metrics


def memory_gib(meminfo: str) -> tuple[float, float]:
    """Parse (in use, total) GiB of the machine from Linux's /proc/meminfo; in use: total minus available."""
    kib = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.splitlines() if ":" in line}
    used = kib["MemTotal"] - kib["MemAvailable"]
    return used * 1024 / _GIB, kib["MemTotal"] * 1024 / _GIB


def sequence_balance_metrics(num_tokens: Sequence[int], rank_rows: Sequence[Sequence[int]]) -> dict[str, float]:
    """Compute `global_seqlen/*`: tokens per data-parallel rank, as the rows came and after balancing.

    `rank_rows[r]` holds the positions of the rows given to rank r, as `parallel.balance.balance_ranks` returns them.
    """
    num_ranks, rows = len(rank_rows), len(num_tokens)
    if sorted(i for part in rank_rows for i in part) != list(range(rows)):
        given = [list(part) for part in rank_rows]
        raise ValueError(f"rank_rows must hold each of the {rows} rows exactly once, got {given}")
    bounds = [rows * r // num_ranks for r in range(num_ranks + 1)]
    plain = [sum(num_tokens[bounds[r] : bounds[r + 1]]) for r in range(num_ranks)]
    balanced = [sum(num_tokens[i] for i in part) for part in rank_rows]
    return {
        "global_seqlen/min": float(min(plain)),
        "global_seqlen/max": float(max(plain)),
        "global_seqlen/minmax_diff": float(max(plain) - min(plain)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": sum(num_tokens) / num_ranks,
    }


def training_metrics(global_step: int, epoch: int) -> dict[str, float]:
    """Report the run's step and epoch; trackers use `training/global_step` as the x axis."""
    return {"training/global_step": float(global_step), "training/epoch": float(epoch)}


def domain_metrics(rollouts: Rollouts, scores: Scores) -> dict[str, float]:
    """Empty for a single data source. Rows whose reward failed count in lengths and failures only.

    An episode of several rows is one response.
    """
    rollouts, scores = whole_episodes(rollouts, scores)
    rows_of: dict[str, list[int]] = {}
    for i, row in enumerate(rollouts.rows):
        rows_of.setdefault(row.data_source, []).append(i)
    if len(rows_of) < 2:
        return {}
    groups, lengths = rollouts.group_B.tolist(), rollouts.response_length_B.tolist()
    values, valid = scores.score_B.tolist(), scores.valid_B.tolist()
    metrics: dict[str, float] = {}
    for source, rows in rows_of.items():
        graded = [i for i in rows if valid[i]]
        one = {
            "num_prompts": float(len({groups[i] for i in rows})),
            "share": len(rows) / len(rollouts),
            "response_length/mean": statistics.fmean(lengths[i] for i in rows),
            "response_length/clip_ratio": rollouts.cut_off_B[rows].double().mean().item(),
            "reward_failures": float(len(rows) - len(graded)),
        }
        if graded:
            one |= _scores([values[i] for i in graded], [groups[i] for i in graded])
        metrics |= {f"domain/{source}/{name}": value for name, value in one.items()}
    return metrics


def _scores(values: Sequence[float], groups: Sequence[int]) -> dict[str, float]:
    """Mean and spread, and the share of prompts whose responses all got the same score (nothing to learn from)."""
    by_group: dict[int, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        by_group.setdefault(group, []).append(value)
    return {
        "score/mean": statistics.fmean(values),
        "score/std": statistics.pstdev(values),
        "score/max": max(values),
        "score/min": min(values),
        "group_zero_std_fraction": statistics.fmean(len(set(group)) == 1 for group in by_group.values()),
    }
