"""Statistics of each data source in a training batch, where there are several: is the mix what it should be, and does
each source learn? Names: domain/<data_source>/..."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from verl_like.batch import Rollouts, Scores, whole_episodes


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
