"""One sentence a step: the change that would save most time, as far as the step's own numbers can tell.

Each rule estimates the seconds that its cause costs in this step; the largest wins. Estimates are rough: they rank
causes, they promise nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

WORTH_SAYING = 0.05  # share of the step that a cause must cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The user's choices that rules speak about."""

    token_budget: int | None  # actor.ppo_max_token_len_per_gpu, None when micro-batches are cut by count
    balance_batch: bool
    old_log_probs: str  # as asked for; auto where something else needs their pass
    optimizer_steps_per_rollout: int
    gradient_checkpointing: bool
    async_reward: bool
    groups_cost: bool  # those without a signal are computed, and teach nothing
    num_ranks: int
    save_freq: int | None = None
    test_freq: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Cause of lost time, and the remedy."""

    seconds: float
    sentence: str


Rule = Callable[[Mapping[str, float], Mapping[str, float], Settings], Cause | None]


def advise(seconds: Mapping[str, float], metrics: Mapping[str, float], settings: Settings) -> str | None:
    """The most useful sentence about this step, or None when no cause costs 5% of it."""
    found = [cause for rule in RULES if (cause := rule(seconds, metrics, settings)) is not None]
    best = max(found, key=lambda cause: cause.seconds, default=None)
    if best is None or best.seconds < WORTH_SAYING * seconds.get("step", 0.0):
        return None
    return best.sentence


def empty_budget(seconds: Mapping[str, float], metrics: Mapping[str, float], settings: Settings) -> Cause | None:
    """Rows that do not pack well into the token budget: more, smaller micro-batches than needed."""
    fill, count = metrics.get("perf/micro_batch_fill"), metrics.get("perf/micro_batches", 0.0)
    if settings.token_budget is None or fill is None or count <= math.ceil(count * fill):
        return None  # no budget, or as few micro-batches as these tokens can have
    better = 1 << (2 * settings.token_budget - 1).bit_length()
    return Cause(
        seconds=0.5 * (1 - fill) * seconds.get("update_actor", 0.0),
        sentence=f"the token budget leaves {1 - fill:.0%} of each micro-batch empty: raise "
        f"actor.ppo_max_token_len_per_gpu from {settings.token_budget} to {better} if memory allows",
    )


def uneven_ranks(seconds: Mapping[str, float], metrics: Mapping[str, float], settings: Settings) -> Cause | None:
    """Ranks wait for the one with most tokens."""
    mean, largest = metrics.get("global_seqlen/mean"), metrics.get("global_seqlen/balanced_max")
    if settings.num_ranks < 2 or not mean or largest is None:
        return None
    lost = 1 - mean / largest
    fix = (
        "one row is longer than a rank's fair share: lower data.max_response_length or raise data.train_batch_size"
        if settings.balance_batch
        else "set trainer.balance_batch=True"
    )
    passes = sum(seconds.get(name, 0.0) for name in ("old_log_prob", "ref", "values", "update_actor", "update_critic"))
    return Cause(seconds=lost * passes, sentence=f"the fullest rank has {largest / mean - 1:.0%} more tokens: {fix}")


def long_tail(seconds: Mapping[str, float], metrics: Mapping[str, float], settings: Settings) -> Cause | None:
    """Generation waits for its longest response while most rows are done."""
    mean, longest = metrics.get("response_length/mean"), metrics.get("response_length/max")
    if not mean or not longest or longest < 3 * mean:
        return None
    return Cause(
        seconds=0.5 * (1 - mean / longest) * seconds.get("gen", 0.0),
        sentence=f"the longest response has {longest / mean:.1f} times the mean length, and generation waits for it: "
        "lower data.max_response_length, or raise data.train_batch_size so that the engine stays full",
    )


def groups_without_signal(
    seconds: Mapping[str, float], metrics: Mapping[str, float], settings: Settings
) -> Cause | None:
    """Work on prompts whose responses all got the same reward teaches nothing."""
    share = metrics.get("critic/group_zero_std_fraction", 0.0)
    if not settings.groups_cost or share <= 0:
        return None
    worked = sum(seconds.get(name, 0.0) for name in ("gen", "update_actor", "old_log_prob", "ref"))
    return Cause(
        seconds=share * worked,
        sentence=f"{share:.0%} of the groups gave no signal (all rewards equal): choose prompts nearer to the model's "
        "level, raise rollout.n, or set algorithm.filter_groups.enable=True",
    )


def slow_reward(seconds: Mapping[str, float], metrics: Mapping[str, float], settings: Settings) -> Cause | None:
    """Grading that nothing overlaps."""
    if settings.async_reward:
        return None
    return Cause(
        seconds=seconds.get("reward", 0.0),
        sentence=f"grading takes {_share(seconds, 'reward')} of the step: set reward_model.launch_reward_fn_async=True "
        "or raise custom_reward_function.num_workers",
    )


def needless_pass(seconds: Mapping[str, float], metrics: Mapping[str, float], settings: Settings) -> Cause | None:
    """Old log-probs of the very policy that the only update starts from."""
    if settings.old_log_probs != "recompute" or settings.optimizer_steps_per_rollout > 1:
        return None
    return Cause(
        seconds=seconds.get("old_log_prob", 0.0),
        sentence="with one update per batch old log-probs need no pass of their own: set actor.old_log_probs=auto",
    )


def recomputed_activations(
    seconds: Mapping[str, float], metrics: Mapping[str, float], settings: Settings
) -> Cause | None:
    """Gradient checkpointing costs a third of the update; worth it only when memory is short."""
    used = metrics.get("perf/memory_used_fraction")
    if not settings.gradient_checkpointing or used is None or used > 0.5:
        return None
    return Cause(
        seconds=0.2 * seconds.get("update_actor", 0.0),
        sentence=f"memory is {used:.0%} full and activations are recomputed: set "
        "model.enable_gradient_checkpointing=False",
    )


def slow_sync(seconds: Mapping[str, float], metrics: Mapping[str, float], settings: Settings) -> Cause | None:
    """The weight sync with its proof."""
    return Cause(
        seconds=0.5 * seconds.get("update_weights", 0.0),
        sentence=f"the weight sync takes {_share(seconds, 'update_weights')} of the step: raise data.train_batch_size, "
        "or set rollout.sync_probe=False once you trust the run",
    )


def slow_housekeeping(seconds: Mapping[str, float], metrics: Mapping[str, float], settings: Settings) -> Cause | None:
    """Saving and validating, spread over the steps between; what is done once, at the end, costs little."""
    every = {"save_checkpoint": ("save_freq", settings.save_freq), "testing": ("test_freq", settings.test_freq)}
    spread = {name: seconds.get(name, 0.0) / steps for name, (_, steps) in every.items() if steps and steps > 0}
    if not spread:
        return None
    name = max(spread, key=lambda name: spread[name])
    whole = seconds.get("step", 0.0) - sum(seconds.get(other, 0.0) for other in every) + sum(spread.values())
    key, steps = every[name]
    return Cause(
        seconds=0.5 * spread[name],
        sentence=f"{name} takes {spread[name] / max(whole, 1e-9):.0%} of the time: raise trainer.{key} from {steps}",
    )


def _share(seconds: Mapping[str, float], name: str) -> str:
    return f"{seconds.get(name, 0.0) / max(seconds.get('step', 0.0), 1e-9):.0%}"


RULES: tuple[Rule, ...] = (
    empty_budget,
    uneven_ranks,
    long_tail,
    groups_without_signal,
    slow_reward,
    needless_pass,
    recomputed_activations,
    slow_sync,
    slow_housekeeping,
)
