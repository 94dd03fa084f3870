"""Rewards and advantages written down once more, an episode at a time in plain numbers: the yardstick of a whole step.

Formulas are those of docs/algorithms.md; an estimator that is not written down here is borrowed, and said to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from verl_like.algorithms.reward_shaping import norm_scopes
from verl_like.batch import PromptRow
from verl_like.config import AlgorithmConfig, KLControlConfig, KLControlType, PPOConfig

Numbers = list[float]
Credit = list[tuple[Numbers, Numbers]]  # advantages and returns of each episode's tokens


@dataclass(slots=True, kw_only=True)
class PlainEpisode:
    """One response, its rows joined; a list has one number for each of its tokens."""

    group: int
    asked: PromptRow
    extras: dict[str, Any]  # what the reward function returned beside the score
    score: float = 0.0
    baseline: float = 0.0
    cut: bool = False  # at the length limit
    rows: list[int] = field(default_factory=list)  # in the rollouts
    mask: list[bool] = field(default_factory=list)  # sampled by the policy
    rewards: Numbers = field(default_factory=list)
    values: Numbers = field(default_factory=list)

    @property
    def total(self) -> float:
        """Reward of the whole response."""
        return sum(r for r, inside in zip(self.rewards, self.mask, strict=True) if inside)


def response_rewards(episodes: Sequence[PlainEpisode], config: PPOConfig, so_far: Numbers) -> Numbers:
    """Reward of each response: score, length reward, overlong buffer, normalisation, bound. so_far: those of all steps.

    Which mean and which deviation the keys of algorithm.reward_norm mean is read by the run's own `norm_scopes`.
    """
    longest, model = config.data.max_response_length, config.reward_model
    by_length, buffer = model.length_reward, model.overlong_buffer
    found: Numbers = []
    for one in episodes:
        reward, length = one.score, len(one.mask)
        reward += by_length.coef * length / longest if by_length.enable else 0.0
        chosen = buffer.only_key is None or bool(one.extras[buffer.only_key])
        if buffer.enable and chosen and not (one.cut and buffer.truncated != "penalise"):
            reward -= (
                buffer.penalty_factor * min(max(length - longest + buffer.len, 0), buffer.len) / max(buffer.len, 1)
            )
        found.append(0.0 if buffer.enable and one.cut and buffer.truncated == "zero" else reward)
    found = _agent_normed(found, episodes, config.algorithm)
    so_far += found
    of_mean, of_deviation = norm_scopes(config.algorithm)

    def over(scope: str | None, group: int) -> Numbers:
        inside = [reward for reward, each in zip(found, episodes, strict=True) if each.group == group]
        return {"running": so_far, "group": inside}.get(str(scope), found)

    normed: Numbers = []
    for reward, one in zip(found, episodes, strict=True):
        centred, spread = reward, over(of_deviation, one.group)
        centred -= 0.0 if of_mean is None else fmean(over(of_mean, one.group))
        deviation = stdev(spread) if of_deviation is not None and len(spread) > 1 else 0.0
        normed.append(centred / (deviation + 1e-6) if deviation > 1e-6 else centred)
    return clipped([normed], config.algorithm.reward_clip)[0]


def _agent_normed(rewards: Numbers, episodes: Sequence[PlainEpisode], algorithm: AlgorithmConfig) -> Numbers:
    """Rewards less the mean of those that algorithm.agent_reward_norm compares, by their deviation and bounded."""
    rule, found = algorithm.agent_reward_norm, Numbers()
    if rule.method == "identity":
        return rewards
    known = {"state": lambda one: one.group, "batch": lambda _: 0, "inductive": lambda one: one.asked.data_source}
    known |= {name: lambda one, name=name: getattr(one.asked, name) for name in ("data_source", "ability", "index")}
    of = [known.get(rule.grouping, lambda one: one.asked.extra_info[rule.grouping])(one) for one in episodes]
    for reward, mine in zip(rewards, of, strict=True):
        others = [other for other, each in zip(rewards, of, strict=True) if each == mine]
        value, deviation = reward - fmean(others), stdev(others) if len(others) > 1 else 0.0
        if rule.method != "mean":
            value = value / (deviation + 1e-6) if deviation > 1e-6 else 0.0
        found.append(min(max(value, rule.clip[0]), rule.clip[1]) if rule.method == "asym_clip" else value)
    return found


def next_coefficient(control: KLControlConfig, coefficient: float, mean_kl: float, responses: int) -> float:
    """Coefficient of the penalty after a step (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)."""
    if control.type is KLControlType.fixed:
        return coefficient
    return coefficient * (1 + min(max(mean_kl / control.target_kl - 1, -0.2), 0.2) * responses / control.horizon)


def place_reward(episode: PlainEpisode, score: float, kl: Numbers, coefficient: float) -> None:
    """Score on the last sampled token, less the penalty on each."""
    last = max(place for place, inside in enumerate(episode.mask) if inside)
    for place, inside in enumerate(episode.mask):
        episode.rewards[place] = (score if place == last else 0.0) - (coefficient * kl[place] if inside else 0.0)


def credit(episodes: Sequence[PlainEpisode], algorithm: AlgorithmConfig) -> Credit:
    """(advantages, returns) of each episode's tokens, 0 on what was not sampled. KeyError: not written down here."""
    return OWN_ESTIMATORS[algorithm.adv_estimator](episodes, algorithm)


def _gae(episodes: Sequence[PlainEpisode], algorithm: AlgorithmConfig) -> Credit:
    raw, returns = [], []
    for episode in episodes:
        advantages, following, later = [0.0] * len(episode.mask), 0.0, 0.0
        for t in reversed([t for t, inside in enumerate(episode.mask) if inside]):
            error = episode.rewards[t] + algorithm.gamma * following - episode.values[t]
            later = error + algorithm.gamma * algorithm.lam * later
            advantages[t], following = later, episode.values[t]
        raw.append(advantages)
        returns.append(
            [a + v if ok else 0.0 for a, v, ok in zip(advantages, episode.values, episode.mask, strict=True)]
        )
    return list(zip(whitened(episodes, raw), returns, strict=True))


def _reinforce_plus_plus(episodes: Sequence[PlainEpisode], algorithm: AlgorithmConfig) -> Credit:
    returns = [_to_go(episode, algorithm.gamma) for episode in episodes]
    return list(zip(whitened(episodes, returns), returns, strict=True))


def _remax(episodes: Sequence[PlainEpisode], algorithm: AlgorithmConfig) -> Credit:
    found = []
    for episode in episodes:
        returns = _to_go(episode, 1.0)
        less = [r - episode.baseline if ok else 0.0 for r, ok in zip(returns, episode.mask, strict=True)]
        found.append((less, returns))
    return found


def _by_group(
    weigh: Callable[[float, Numbers, AlgorithmConfig], float],
) -> Callable[..., Credit]:
    """Estimator of one number for each response, from its reward and those of its group."""

    def estimate(episodes: Sequence[PlainEpisode], algorithm: AlgorithmConfig) -> Credit:
        found = []
        for episode in episodes:
            others = [each.total for each in episodes if each.group == episode.group]
            value = weigh(episode.total, others, algorithm) if len(others) > 1 else 0.0
            advantages = [value if inside else 0.0 for inside in episode.mask]
            found.append((advantages, advantages))
        return found

    return estimate


def _grpo(reward: float, group: Numbers, algorithm: AlgorithmConfig) -> float:
    mean = sum(group) / len(group)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in group) / (len(group) - 1))
    return (reward - mean) / (deviation + 1e-6 if algorithm.norm_adv_by_std_in_grpo else 1.0)


def _dr_grpo(reward: float, group: Numbers, algorithm: AlgorithmConfig) -> float:
    return reward - sum(group) / len(group)


def _rloo(reward: float, group: Numbers, algorithm: AlgorithmConfig) -> float:
    return reward - (sum(group) - reward) / (len(group) - 1)


def _to_go(episode: PlainEpisode, gamma: float) -> Numbers:
    """Discounted sum of the rewards from each sampled token on."""
    found, later = [0.0] * len(episode.mask), 0.0
    for t in reversed([t for t, inside in enumerate(episode.mask) if inside]):
        found[t] = later = episode.rewards[t] + gamma * later
    return found


def clipped(values: list[Numbers], bound: float | None) -> list[Numbers]:
    """Bound every number; None or 0: not at all."""
    return [[min(max(v, -bound), bound) for v in row] for row in values] if bound else values


def whitened(episodes: Sequence[PlainEpisode], values: list[Numbers]) -> list[Numbers]:
    """Less the mean over all sampled tokens of the batch, by their deviation."""
    inside = [
        value
        for episode, row in zip(episodes, values, strict=True)
        for value, ok in zip(row, episode.mask, strict=True)
        if ok
    ]
    mean = sum(inside) / len(inside)
    variance = sum((value - mean) ** 2 for value in inside) / max(len(inside) - 1, 1)
    scale = 1.0 / math.sqrt(variance + 1e-8)
    return [
        [(value - mean) * scale if ok else 0.0 for value, ok in zip(row, episode.mask, strict=True)]
        for episode, row in zip(episodes, values, strict=True)
    ]


OWN_ESTIMATORS: dict[str, Callable[[Sequence[PlainEpisode], AlgorithmConfig], Credit]] = {
    "gae": _gae,
    "grpo": _by_group(_grpo),
    "dr_grpo": _by_group(_dr_grpo),
    "rloo": _by_group(_rloo),
    "reinforce_plus_plus": _reinforce_plus_plus,
    "remax": _remax,
}
