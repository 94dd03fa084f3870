"""Validation metrics per data source, named as verl names them.

    val-core/<data_source>/<acc|reward>/{mean@N, best@N/mean, best@N/std, maj@N/mean, maj@N/std}
    val-aux/<data_source>/<variable>/...    everything else: std@N, smaller n, worst@n, pass@k, other variables

N is the number of responses per prompt, n runs over 2, 4, 8 .. N. The core variable of a data source is "acc" if the
reward function gave one for every response, usable or not, else "reward". A statistic is computed per prompt and then
averaged over prompts. Rows whose reward failed are left out and counted (`val-aux/<data_source>/failed_rewards`), and
so are rows from the statistics of a variable that is no usable number in them (`val-aux/<data_source>/<variable>/
left_out`); a prompt that lost rows takes no part in statistics of more responses than it has left. N counts lost ones.

Departure from verl, on purpose: verl estimates best@n and worst@n from 1,000 draws WITH replacement, which is random
and too pessimistic (best@N misses the best response 36% of the time). Here they are the exact mean and standard
deviation over all subsets of n different responses. For 0/1 values best@n/mean then is the unbiased pass@k of
https://arxiv.org/abs/2107.03374, which is also reported as pass@k. maj@n goes over all subsets too, or over 1,000 of
them drawn with a fixed seed when there are more; tied answers share the vote. A response whose answer could not be read
(`pred` is None, NaN, blank or [INVALID]) does not vote, unless no other of the subset does: then the mean value counts.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_like.batch import PromptRow, Rollouts, Scores, numeric_extras, unusable_extras, whole_episodes

_MAX_SUBSETS = 1000
_NO_ANSWER = "[INVALID]"  # of DAPO's grader
_CORE_STATISTICS = ("mean@", "best@", "maj@")


def validation_metrics(batches: Iterable[tuple[Rollouts, Scores]]) -> dict[str, float]:
    """Metrics of a whole validation pass. Group numbers need to be unique within a batch only.

    An episode of several rows is one response, so that best@n and maj@n draw n episodes.
    """
    batches = [whole_episodes(rollouts, scores) for rollouts, scores in batches]
    names = report_names(row for rollouts, _ in batches for row in rollouts.rows)
    sources: dict[str, dict[tuple[int, int], list[_Response]]] = {}
    asked: dict[str, Counter[tuple[int, int]]] = {}  # how many responses each prompt has, with those that failed
    further: dict[str, list[Mapping[str, Any]]] = {}
    failed: dict[str, int] = {}
    for batch_number, (rollouts, scores) in enumerate(batches):
        for i, prompt_row in enumerate(rollouts.rows):
            source = names[prompt_row.validation_set, prompt_row.data_source]
            group = (batch_number, int(rollouts.group_B[i]))
            prompts = sources.setdefault(source, {})
            failed.setdefault(source, 0)
            asked.setdefault(source, Counter())[group] += 1
            rows = prompts.setdefault(group, [])
            if bool(scores.valid_B[i]):
                rows.append(_response(scores, i))
                further.setdefault(source, []).append(scores.extras[i])
            else:
                failed[source] += 1
    metrics: dict[str, float] = {}
    for source, prompts in sources.items():
        most = max(asked[source].values())
        metrics |= _source_metrics(source, [rows for rows in prompts.values() if rows], most)
        for name, left_out in unusable_extras(further.get(source, [])).items():
            metrics[f"val-aux/{source}/{name}/left_out"] = float(len(left_out))
        metrics[f"val-aux/{source}/failed_rewards"] = float(failed[source])
        metrics[f"val-aux/{source}/num_prompts"] = float(len(prompts))
    return metrics


def report_names(rows: Iterable[PromptRow]) -> dict[tuple[str, str], str]:
    """Map (validation set, data source) to the name of its metrics and files.

    Without named sets (data.val_files as a dictionary) that is the data source; else the set's name, followed by the
    data source where the set holds several.
    """
    sources: dict[str, set[str]] = {}
    for row in rows:
        sources.setdefault(row.validation_set, set()).add(row.data_source)
    return {
        (name, source): source if not name else name if len(found) == 1 else f"{name}/{source}"
        for name, found in sources.items()
        for source in found
    }


@dataclass(frozen=True, slots=True)
class _Response:
    values: dict[str, float]  # variable -> number
    has_acc: bool  # the reward function gave one, be it a number or not, or failed
    answer: str | None  # what majority votes count ("pred" of the reward function); "": unreadable; None: it gave none


def _response(scores: Scores, row: int) -> _Response:
    extra = scores.extras[row]
    pred, values = extra.get("pred"), {**numeric_extras(extra), "reward": float(scores.score_B[row])}
    answer = "" if pred is None or pred != pred else str(pred).strip().removeprefix(_NO_ANSWER)
    has_acc = "acc" in extra or scores.failures[row] is not None  # that one has reward_model.failure_penalty
    return _Response(values, has_acc, answer if "pred" in extra else None)


def _source_metrics(source: str, prompts: list[list[_Response]], asked: int) -> dict[str, float]:
    responses = [response for prompt in prompts for response in prompt]
    if not responses:
        return {}
    has_acc = all(response.has_acc for response in responses) and any("acc" in r.values for r in responses)
    core = "acc" if has_acc else "reward"
    metrics: dict[str, float] = {}
    for name in sorted({name for response in responses for name in response.values}):
        columns = [[response for response in prompt if name in response.values] for prompt in prompts]
        columns = [column for column in columns if column]
        for statistic, value in _variable_metrics(name, columns, asked).items():
            is_core = name == core and statistic.startswith(_CORE_STATISTICS) and f"@{asked}" in statistic
            metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{statistic}"] = value
    return metrics


def _variable_metrics(name: str, prompts: list[list[_Response]], largest: int) -> dict[str, float]:
    """All statistics of one variable, averaged over prompts; those for which no prompt has responses enough are not."""
    values = [[response.values[name] for response in prompt] for prompt in prompts]
    metrics = {f"mean@{largest}": statistics.fmean(statistics.fmean(v) for v in values)}
    if largest == 1:
        return metrics
    if spreads := [statistics.pstdev(v) for v in values if len(v) > 1]:
        metrics[f"std@{largest}"] = statistics.fmean(spreads)
    binary = all(v in (0.0, 1.0) for prompt in values for v in prompt)
    if binary:
        metrics["pass@1"] = metrics[f"mean@{largest}"]
    votes = [[(r.answer, r.values[name]) for r in prompt if r.answer is not None] for prompt in prompts]
    for n in subset_sizes(largest):
        best = [best_of(v, n) for v in values if len(v) >= n]
        if not best:
            break
        worst = [best_of([-x for x in v], n) for v in values if len(v) >= n]
        metrics |= _mean_and_std(f"best@{n}", best)
        metrics |= _mean_and_std(f"worst@{n}", [(-mean, std) for mean, std in worst])
        if binary:
            metrics[f"pass@{n}"] = metrics[f"best@{n}/mean"]
        majorities = [majority_of(v, n) for v in votes if len(v) >= n]
        if majorities:
            metrics |= _mean_and_std(f"maj@{n}", majorities)
    return metrics


def _mean_and_std(name: str, per_prompt: list[tuple[float, float]]) -> dict[str, float]:
    return {
        f"{name}/mean": statistics.fmean(mean for mean, _ in per_prompt),
        f"{name}/std": statistics.fmean(std for _, std in per_prompt),
    }


def subset_sizes(num_responses: int) -> list[int]:
    """List 2, 4, 8 .. below the number of responses, then that number itself (verl's list)."""
    return [n for n in (2**k for k in range(1, 31)) if n < num_responses] + [num_responses]


def best_of(values: Sequence[float], n: int) -> tuple[float, float]:
    """Mean and standard deviation, over all subsets of n values, of the subset's maximum.

    The i-th smallest value (from 1) is the maximum of C(i-1, n-1) of the C(N, n) subsets.
    """
    ordered, subsets = sorted(values), math.comb(len(values), n)
    weights = [math.comb(i - 1, n - 1) / subsets for i in range(1, len(ordered) + 1)]
    mean = sum(w * v for w, v in zip(weights, ordered, strict=True))
    variance = sum(w * (v - mean) ** 2 for w, v in zip(weights, ordered, strict=True))
    return mean, math.sqrt(variance)


def majority_of(votes: Sequence[tuple[str, float]], n: int) -> tuple[float, float]:
    """Mean and standard deviation, over subsets of n (answer, value) pairs, of the most frequent answer's value."""
    if math.comb(len(votes), n) <= _MAX_SUBSETS:
        subsets: Iterable[Sequence[tuple[str, float]]] = itertools.combinations(votes, n)
    else:
        rng = random.Random(0)
        subsets = (rng.sample(votes, n) for _ in range(_MAX_SUBSETS))
    results = [_vote(subset) for subset in subsets]
    return statistics.fmean(results), statistics.pstdev(results)


def _vote(votes: Sequence[tuple[str, float]]) -> float:
    votes = [vote for vote in votes if vote[0]] or votes  # what could not be read has no say
    by_answer: dict[str, list[float]] = {}
    for answer, value in votes:
        by_answer.setdefault(answer, []).append(value)
    most = max(len(values) for values in by_answer.values())
    return statistics.fmean(statistics.fmean(values) for values in by_answer.values() if len(values) == most)
