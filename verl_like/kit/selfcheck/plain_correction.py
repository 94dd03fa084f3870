"""algorithm.rollout_correction written down once more, a row at a time in plain numbers: the yardstick of the check.

Only the reading of the bounds (config/correction.py) is shared with what is checked. docs/rollout_correction.md defines
the terms; p, q = probability of a token for trainer and sampler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from verl_like.config import RolloutCorrectionConfig
from verl_like.config.correction import Bounds, parse_rejections, weight_bounds

Numbers = list[float]


def kept_tokens(
    log_p: Numbers, log_q: Numbers, mask: Sequence[bool], correction: RolloutCorrectionConfig
) -> list[bool]:
    """Choose the tokens of one row that are trained on: sampled, known to the sampler, inside all bounds."""
    known = [inside and math.isfinite(q) for inside, q in zip(mask, log_q, strict=True)]
    rejections = parse_rejections(correction.rollout_rs, correction.rollout_rs_threshold)
    veto = correction.rollout_token_veto_threshold
    row_weights = correction.rollout_is not in (None, "token")
    by_row = row_weights or veto is not None or any(rule.level != "token" for rule in rejections)
    if by_row and known != list(mask):
        return [False] * len(known)
    kept = list(known)
    for rule in rejections:
        values = [_statistic(rule.statistic, p, q) if ok else 0.0 for p, q, ok in zip(log_p, log_q, known, strict=True)]
        joined = _joined(values, known, rule.level)
        kept = [ok and _inside(rule.statistic, value, rule.bounds) for ok, value in zip(kept, joined, strict=True)]
    if veto is not None and any(ok and p - q < math.log(veto) for p, q, ok in zip(log_p, log_q, known, strict=True)):
        return [False] * len(known)
    return kept


def weights(log_p: Numbers, log_q: Numbers, mask: Sequence[bool], correction: RolloutCorrectionConfig) -> Numbers:
    """Importance weight of each token of one row, within its bounds; 0 where the sampler's log-prob is unknown."""
    known = [inside and math.isfinite(q) for inside, q in zip(mask, log_q, strict=True)]
    difference = [p - q if ok else 0.0 for p, q, ok in zip(log_p, log_q, known, strict=True)]
    level = {"sequence": "seq_sum", "geometric": "seq_mean", "segment": "segment_mean", "token": "token"}
    joined = _joined(difference, known, level[str(correction.rollout_is)])
    bounds, found = weight_bounds(correction.rollout_is_threshold), []
    for value, ok in zip(joined, known, strict=True):
        weight = math.exp(min(max(value, -20.0), 20.0)) if ok else 0.0
        if bounds.high is not None and weight > bounds.high:
            weight = bounds.high if bounds.low is None else 0.0
        found.append(0.0 if bounds.low is not None and weight < bounds.low else weight)
    return found


def mean_weight(
    rows: Sequence[Numbers], masks: Sequence[Sequence[bool]], shares: Sequence[float], by_token: bool
) -> float:
    """Average the weights for rollout_is_batch_normalize; 1 where there is no weight.

    The mean is over all tokens, or over rows of the row's mean, each counted by its share of its episode's tokens.
    """
    picked = [[w for w, ok in zip(row, mask, strict=True) if ok] for row, mask in zip(rows, masks, strict=True)]
    counts = [float(len(row)) if by_token else share for row, share in zip(picked, shares, strict=True)]
    found = [(sum(row) / len(row), count) for row, count in zip(picked, counts, strict=True) if row]
    return (sum(value * count for value, count in found) / sum(count for _, count in found) if found else 0.0) or 1.0


def _statistic(name: str, log_p: float, log_q: float) -> float:
    if name == "diff":
        return math.exp(log_p) - math.exp(log_q)
    ratio = min(max(log_p - log_q, -20.0), 20.0)
    return {"k1": -ratio, "k2": ratio * ratio / 2, "k3": math.exp(ratio) - 1 - ratio}[name]


def _joined(values: Numbers, mask: Sequence[bool], level: str) -> Numbers:
    """Spread each token's value, or that of its turn (a run of sampled tokens) or its row, over every token."""
    inside = [value for value, ok in zip(values, mask, strict=True) if ok]
    if level == "token" or not inside:
        return values
    if level == "segment_mean":
        means: Numbers = []
        for sampled, run in groupby(zip(mask, values, strict=True), key=lambda pair: pair[0]):
            members = [value for _, value in run]
            means += [sum(members) / len(members) if sampled else 0.0] * len(members)
        return means
    row = {"seq_sum": sum(inside), "seq_mean": sum(inside) / len(inside), "seq_max": max(inside)}[level]
    return [row] * len(values)


def _inside(statistic: str, value: float, bounds: Bounds) -> bool:
    low, high = bounds.low, bounds.high
    if statistic == "k1":
        low, high = (None if bound is None else math.log(bound) for bound in (low, high))
    return (low is None or value >= low) and (high is None or value <= high)
