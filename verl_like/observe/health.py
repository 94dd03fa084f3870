"""Health of a run: named rules over its metrics, each with the metrics it reads, its threshold and its verdict.

Pure: a history of metrics goes in, verdicts come out; the report shows them, and tests plant histories for each rule.
Thresholds are meant to stay silent in runs that learn; each is a number in `RULES`, with the reason beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
    find: Callable[[Sequence[tuple[int, float]], float], list[int]] = above
    show: Mapping[str, str] = field(default_factory=dict)  # how the rollout browser finds rows that show it


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


RULES: tuple[Rule, ...] = (
    Rule(
        name="mismatch drift",
        metrics=("training/rollout_probs_diff_mean",),
        threshold=0.02,  # bfloat16 engines stay below 0.01
        means="trainer and rollout engine give the sampled tokens probabilities that differ by more than {threshold}",
        needed=3,
        fix="look at rollout.dtype, top_p and top_k; algorithm.rollout_correction corrects for it",
        show={"sort": "gap"},
    ),
    Rule(
        name="entropy collapse",
        metrics=("actor/entropy",),
        threshold=0.05,  # tasks with one right answer end at a tenth of where they began, and learn to the end
        means="the policy's entropy is under {threshold:.0%} of where it started: nothing new is tried any more",
        find=below_start,
        needed=5,
        fix="lower the learning rate, raise actor.clip_ratio_high or actor.entropy_coeff",
        show={"color": "entropy"},
    ),
    Rule(
        name="reward saturation",
        metrics=("score_share",),
        threshold=0.98,
        means="the mean score is above {threshold:.0%} of the best score: there is little left to learn here",
        needed=5,
        fix="stop here, or go on with harder prompts",
        show={"sort": "score"},
    ),
    Rule(
        name="score fell",
        metrics=("critic/score/mean",),
        threshold=0.5,
        means="the mean score of ten steps lost more than {threshold:.0%} of what the run had gained",
        find=fallen,
        needed=3,
        fix="go back to the best checkpoint, with a lower learning rate or a KL term (actor.use_kl_loss)",
        show={"sort": "score"},
    ),
    Rule(
        name="groups without signal",
        metrics=("critic/group_zero_std_fraction",),
        threshold=0.9,
        means="more than {threshold:.0%} of the prompts got the same score for all responses: they teach nothing",
        needed=5,
        fix="choose prompts nearer to the model's level, raise rollout.n, or algorithm.filter_groups.enable=True",
        show={"sort": "group"},
    ),
    Rule(
        name="length growth",
        metrics=("response_length/mean",),
        threshold=3.0,
        means="responses are more than {threshold:g} times as long as at the start",
        find=above_start,
        needed=5,
        fix="read the longest ones; reward_model.overlong_buffer, or actor.loss_agg_mode=token-mean",
        show={"sort": "response_tokens"},
    ),
    Rule(
        name="truncated responses",
        metrics=("response_length/clip_ratio",),
        threshold=0.25,
        means="more than {threshold:.0%} of the responses are cut off by a length limit before their end",
        needed=5,
        fix="raise data.max_response_length, or punish length: reward_model.overlong_buffer",
        show={"outcome": "truncated"},
    ),
    Rule(
        name="clip storm",
        metrics=("actor/pg_clipfrac",),
        threshold=0.3,
        means="more than {threshold:.0%} of the tokens are clipped: updates go too far from what was sampled",
        needed=3,
        fix="lower the learning rate or the number of updates per batch",
    ),
    Rule(
        name="policy jump",
        metrics=("actor/ppo_kl",),
        threshold=0.2,
        means="the policy moves more than {threshold:g} nats a token within one batch",
        needed=2,
        fix="lower the learning rate or the number of updates per batch",
    ),
    Rule(
        name="gradient spikes",
        metrics=("actor/grad_norm",),
        threshold=10.0,
        means="the gradient's norm is more than {threshold:g} times its usual size",
        find=spikes,
        needed=1,
        fix="look at the rows of that step; actor.grad_clip bounds the damage",
    ),
    Rule(
        name="skipped updates",
        metrics=("actor/skipped_steps", "critic/skipped_steps"),
        threshold=0.0,
        means="updates were skipped because their gradient was not finite",
        needed=1,
        fix="look at the gradient norms and rewards before; lower the learning rate",
    ),
    Rule(
        name="numbers not finite",
        metrics=("training/not_finite", "training/rollout_log_probs_nonfinite"),
        threshold=0.0,
        means="metrics of actor or critic, or log-probs of the rollout engine, are NaN or infinite",
        needed=1,
        fix="look for the first of them in metrics.jsonl (null there), and at the rewards of that step",
    ),
    Rule(
        name="stale weights",
        metrics=("training/weight_staleness",),
        threshold=1.0,
        means="tokens were sampled by weights more than {threshold:g} version older than the newest that sampled",
        needed=3,
        fix="check that this much staleness is meant, and that algorithm.rollout_correction is on",
        show={"color": "weight_version"},
    ),
    Rule(
        name="weights that do not move",
        metrics=("weight_sync/num_changed",),
        threshold=0.0,
        means="the rollout engine got the same weights again: the update changed nothing",
        find=at_zero,
        needed=3,
        fix="look at actor/lr and actor/grad_norm; a rollout dtype may be too coarse for so small a learning rate",
    ),
    Rule(
        name="duplicates",
        metrics=("long_duplicates",),
        threshold=0.5,
        means="more than {threshold:.0%} of the responses repeat another one to the same prompt word for word",
        needed=5,
        fix="raise rollout.temperature, and look at the entropy",
        show={"sort": "group"},
    ),
    Rule(
        name="failed rewards",
        metrics=("reward/failure_fraction",),
        threshold=0.01,
        means="more than {threshold:.0%} of the rewards could not be computed",
        needed=1,
        fix="repair the reward function; verl_like.log names the rows",
        show={"outcome": "grader_error"},
    ),
    Rule(
        name="lost responses",
        metrics=("response/aborted_ratio",),
        threshold=0.01,
        means="more than {threshold:.0%} of the responses are empty or were called off",
        needed=1,
        fix="look at the worker's log; an empty response may also be a model that ends at once",
        show={"outcome": "aborted"},
    ),
    Rule(
        name="memory growth",
        metrics=("perf/cpu_memory_used_gb",),
        threshold=1.5,
        means="the machine has {threshold:g} times as much memory in use as at the start",
        find=above_start,
        needed=10,  # a short peak, or another program's, is none
        fix="see which process grows (ps, top): reward functions and tools that keep what they see are the usual ones",
    ),
)


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
