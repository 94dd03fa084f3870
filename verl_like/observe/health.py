"""Health of a run: named rules over its metrics, each with the metrics it reads, its threshold and its verdict.

Pure: a history of metrics goes in, verdicts come out; the report shows them, and tests plant histories for each rule.
Thresholds are meant to stay silent in runs that learn; each is a number in config/health.txt, with the reason above it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from verl_like.config.trainer import HEALTH

History = Mapping[int, Mapping[str, float]]  # step -> metrics, in step order
WINDOW = 10  # steps with the rule's metrics that count as "now"
EARLY = 10  # steps that "at the start" means


def above(values: Sequence[tuple[int, float]], threshold: float) -> list[int]:
    """Steps with more than the threshold."""
    return [step for step, value in values if value > threshold]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One question to the history. `find` names the steps that show the fault; the rule speaks when `needed` of the
    last `WINDOW` steps do."""

    name: str
    metrics: tuple[str, ...]  # any of them must be there
    threshold: float
    means: str  # with {threshold}
    needed: int
    fix: str
    find: Callable[[Sequence[tuple[int, float]], float], list[int]]
    show: Mapping[str, str]  # how the rollout browser finds rows that show it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict of a rule.

    state: "ok", "fires" (now), "fired" (earlier, not now) or "unknown" (no such metrics).
    """

    rule: Rule
    state: str
    steps: tuple[int, ...] = ()  # that show it
    value: float | None = None  # newest
    metric: str = ""
    sentence: str = ""


def at_zero(values: Sequence[tuple[int, float]], threshold: float) -> list[int]:
    """Steps with no more than the threshold."""
    return [step for step, value in values if value <= threshold]


def below_start(values: Sequence[tuple[int, float]], threshold: float) -> list[int]:
    """Steps with less than this share of the start."""
    start = statistics.median(value for _, value in values[:EARLY])
    return [step for step, value in values[EARLY:] if start > 0 and value < threshold * start]


def above_start(values: Sequence[tuple[int, float]], threshold: float) -> list[int]:
    """Steps with more than this many times the start."""
    start = statistics.median(value for _, value in values[:EARLY])
    return [step for step, value in values[EARLY:] if start > 0 and value > threshold * start]


def spikes(values: Sequence[tuple[int, float]], threshold: float) -> list[int]:
    """Steps with more than this many times the median of the 20 before."""
    found = []
    for i in range(5, len(values)):
        usual = statistics.median(value for _, value in values[max(0, i - 20) : i])
        if usual > 0 and values[i][1] > threshold * usual:
            found.append(values[i][0])
    return found


def fallen(values: Sequence[tuple[int, float]], threshold: float) -> list[int]:
    """Steps whose mean over ten steps has lost more than this share of the best such mean's gain over the start."""
    means = [
        (values[i][0], statistics.fmean(value for _, value in values[i - WINDOW + 1 : i + 1]))
        for i in range(WINDOW - 1, len(values))
    ]
    found, best = [], None
    for step, mean in means:
        best = mean if best is None else max(best, mean)
        gain = best - means[0][1]
        if gain > 0.05 * max(abs(best), 1e-9) and mean < best - threshold * gain:
            found.append(step)
    return found


_FINDERS = {finder.__name__: finder for finder in (above, at_zero, below_start, above_start, spikes, fallen)}


def _rule(name: str, metrics: str, question: str, show: str, means: str, fix: str) -> Rule:
    """Read a row of config/health.txt."""
    finder, threshold, needed = re.split("[:,] ", question)
    return Rule(
        name=name,
        metrics=tuple(metrics.split()),
        threshold=float(threshold),
        means=means,
        needed=int(needed),
        fix=fix,
        find=_FINDERS[finder],
        show=dict(pair.split("=") for pair in show.split()),
    )


RULES = tuple(_rule(*row) for row in HEALTH)


def check_health(history: History) -> list[Verdict]:
    """A verdict of each rule, in the order of `RULES`."""
    return [verdict_of(rule, derived(history)) for rule in RULES]


def derived(history: History) -> dict[int, dict[str, float]]:
    """The history with the two numbers that rules need and no step logs: score_share (place of the mean score between
    the lowest and the highest score ever seen) and long_duplicates (only of responses that are long enough for a
    repetition to be no accident)."""
    highs = [metrics["critic/score/max"] for metrics in history.values() if "critic/score/max" in metrics]
    lows = [metrics["critic/score/min"] for metrics in history.values() if "critic/score/min" in metrics]
    low, high = min(lows, default=0.0), max(highs, default=0.0)
    found: dict[int, dict[str, float]] = {}
    for step, metrics in history.items():
        more: dict[str, float] = {}
        if high > low and "critic/score/mean" in metrics:
            more["score_share"] = (metrics["critic/score/mean"] - low) / (high - low)
        if "response/duplicate_fraction" in metrics:
            is_long = metrics.get("response_length/mean", 0.0) >= 32
            more["long_duplicates"] = metrics["response/duplicate_fraction"] if is_long else 0.0
        found[step] = {**metrics, **more}
    return found


def verdict_of(rule: Rule, history: History) -> Verdict:
    """Apply one rule to a history that has the derived numbers."""
    shown: dict[str, tuple[list[tuple[int, float]], list[int]]] = {}
    for metric in rule.metrics:
        values = [(step, metrics[metric]) for step, metrics in history.items() if metric in metrics]
        if values:
            shown[metric] = values, rule.find(values, rule.threshold)
    if not shown:
        return Verdict(rule=rule, state="unknown", sentence="this run has no such metric")
    metric = max(shown, key=lambda name: len(shown[name][1]))
    values, steps = shown[metric]
    now = {step for step, _ in values[-WINDOW:]}
    fires, fired = len(now & set(steps)) >= rule.needed, len(steps) >= rule.needed
    state = "fires" if fires else "fired" if fired else "ok"
    means = rule.means.format(threshold=rule.threshold)
    sentence = "" if state == "ok" else means + _kinds(history, steps if metric == "reward/failure_fraction" else ())
    found = tuple(steps) if state != "ok" else ()
    return Verdict(rule=rule, state=state, steps=found, value=values[-1][1], metric=metric, sentence=sentence)


def _kinds(history: History, steps: Sequence[int]) -> str:
    """List the kinds of the reward's failures, most frequent first; empty where these steps had none."""
    totals: dict[str, float] = {}
    for step in steps:
        for name, value in history[step].items():
            if name.startswith("reward/failures/") and value:
                kind = name.removeprefix("reward/failures/")
                totals[kind] = totals.get(kind, 0.0) + value
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    return f" ({', '.join(f'{kind}: {count:g}' for kind, count in ordered)})" if ordered else ""
