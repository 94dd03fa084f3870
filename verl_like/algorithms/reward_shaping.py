"""Shaping of rewards, from the reward function's to those that advantages are computed from, and shaping of advantages.

Order, each step off by default (docs/algorithms.md has the picture):
  per response   length reward -> overlong buffer -> reward_norm or agent_reward_norm -> reward_clip
  per token      (score on the last sampled token, minus KL) -> token_reward_clip -> whiten_rewards
  after credit   whiten_advantages -> advantage_clip -> PF-PPO resampling
Every statistic is one of the whole rollout batch, in float64; only rows that are trained on enter it, and an episode
of several rows enters it once. The filter of groups without a signal, at the end, reads shaped rewards too.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_like.algorithms.completeness import SHAPED_REWARDS, complete, component_names, extra_numbers
from verl_like.algorithms.groups import group_statistics
from verl_like.algorithms.masked import masked_fill_zero, masked_whiten
from verl_like.batch import Episodes, PromptRow, Rollouts, Scores, usable_number, whole_episodes
from verl_like.config import (
    AgentRewardNormConfig,
    AlgorithmConfig,
    FilterGroupsConfig,
    LengthRewardConfig,
    OverlongBufferConfig,
    PFPPOConfig,
    RewardModelConfig,
)
from verl_like.flat_columns import row_sums

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMoments:
    """Running count, mean and variance, an immutable value: `update` returns the next one.

    Parallel variance (Chan, Golub and LeVeque 1979), in float64.
    """

    count: int = 0
    mean: float = 0.0
    var: float = 0.0  # biased: divided by count

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 with fewer than two values."""
        return math.sqrt(self.var * self.count / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values_B: Tensor) -> RunningMoments:
        """The moments after these values too."""
        added = len(values_B)
        if not added:
            return self
        values = values_B.double()
        mean, var = values.mean().item(), values.var(correction=0).item()
        total, difference = self.count + added, mean - self.mean
        squares = self.var * self.count + var * added + difference**2 * self.count * added / total
        return RunningMoments(count=total, mean=self.mean + difference * added / total, var=squares / total)

    def state_dict(self) -> dict[str, float]:
        """Plain numbers for the checkpoint; JSON keeps them exactly."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, float]) -> RunningMoments:
        """Restore the moments from the numbers that `state_dict` gave."""
        return cls(count=int(state["count"]), mean=state["mean"], var=state["var"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedRewards:
    """Result of `shape_rewards`."""

    reward_B: Tensor  # float32: reward of each response; NaN where the row cannot be trained on
    moments: RunningMoments  # including this batch
    metrics: dict[str, float]


def trainable_B(rollouts: Rollouts, scores: Scores) -> Tensor:
    """Rows in which the policy sampled a token, of episodes all of whose rows have a reward: bool [B]."""
    episodes = Episodes.of(rollouts)
    return episodes.of_rows(episodes.join(scores).valid_B) & (
        row_sums(rollouts.response_mask_T, rollouts.response_length_B) > 0
    )


def shape_rewards(
    algorithm: AlgorithmConfig,
    reward_model: RewardModelConfig,
    rollouts: Rollouts,
    scores: Scores,
    moments: RunningMoments,
    max_response_length: int,
) -> ShapedRewards:
    """Run the per-response part of the order above: rewards [B], the running moments after this batch, and metrics.

    `moments` are those before this step; they move only where a scope is "running". Rows that cannot be trained on are
    in no statistic, nor those that lack a value which the configuration reads.
    """
    scores = complete(scores, rollouts.rows, algorithm, reward_model=reward_model)
    kept_B = trainable_B(rollouts, scores)
    kept = rollouts.select(kept_B)
    episodes = Episodes.of(kept)
    whole = episodes.join(kept)
    rewards, metrics = response_rewards(reward_model, whole, episodes.join(scores.select(kept_B)), max_response_length)
    agent = algorithm.agent_reward_norm
    if agent.method != "identity":
        rewards = agent_norm(rewards, row_groups(whole, agent.grouping), agent)
    rewards, moments, norm_metrics = reward_norm(algorithm, rewards, whole.group_B, moments)
    rewards, clip_metrics = clip(rewards, algorithm.reward_clip, "critic/reward_clip_frac")
    reward_B = torch.full((len(kept_B),), float("nan"), dtype=torch.float32)
    reward_B[kept_B] = episodes.of_rows(rewards).float()
    return ShapedRewards(reward_B=reward_B, moments=moments, metrics=metrics | norm_metrics | clip_metrics)


def baseline_rewards(
    algorithm: AlgorithmConfig,
    reward_model: RewardModelConfig,
    rollouts: Rollouts,
    scores: Scores,
    max_response_length: int,
) -> Tensor:
    """Rewards of remax's greedy responses, float32 [B]: the row-by-row parts of `shape_rewards`; NaN without a score.

    Length reward, overlong punishment and reward_clip: what the sampled responses get, their baseline must get too.
    """
    kept_B = trainable_B(rollouts, scores)
    kept = rollouts.select(kept_B)
    episodes = Episodes.of(kept)
    rewards, _ = response_rewards(
        reward_model, episodes.join(kept), episodes.join(scores.select(kept_B)), max_response_length
    )
    rewards, _ = clip(rewards, algorithm.reward_clip, "critic/reward_clip_frac")
    reward_B = torch.full((len(kept_B),), float("nan"), dtype=torch.float32)
    reward_B[kept_B] = episodes.of_rows(rewards).float()
    return reward_B


# ---- terms that are added to a response's score


def response_rewards(
    reward_model: RewardModelConfig, rollouts: Rollouts, scores: Scores, max_response_length: int
) -> tuple[Tensor, dict[str, float]]:
    """Score plus length reward plus overlong punishment of each row (float64 [B]), and metrics. Row by row.

    Where there are joined episodes, lengths are those of the episode's responses together.
    """
    rewards, metrics = scores.score_B.double(), {}
    if reward_model.length_reward.enable:
        rewards = rewards + length_reward(reward_model.length_reward, rollouts.response_length_B, max_response_length)
    if reward_model.overlong_buffer.enable:
        rewards, metrics = overlong(reward_model.overlong_buffer, rewards, rollouts, scores, max_response_length)
    return rewards, metrics


def length_reward(config: LengthRewardConfig, length_B: Tensor, max_response_length: int) -> Tensor:
    """coef * response tokens / max_response_length: float64 [B]. (ROLL declares add_len_reward and never reads it.)"""
    return config.coef * length_B.double() / max_response_length


def overlong(
    config: OverlongBufferConfig, rewards_B: Tensor, rollouts: Rollouts, scores: Scores, max_response_length: int
) -> tuple[Tensor, dict[str, float]]:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), and Colossal-RL's treatment of cut-off rows.

    A response of l tokens with budget L and buffer C loses penalty_factor * (l - (L - C)) / C, if that is positive, and
    penalty_factor at most: by length alone, as the formula has it, whether it was cut off or not. What becomes of rows
    that were (finish reason "length") is `truncated`'s choice; `only_key` leaves other rows alone.
    """
    beyond_B = (rollouts.response_length_B.double() - (max_response_length - config.len)).clamp(max=config.len)
    punished_B = (beyond_B > 0) & _chosen(config.only_key, scores)
    cut_B = rollouts.cut_off_B
    if config.truncated != "penalise":
        punished_B &= ~cut_B
    penalty_B = torch.where(punished_B, -config.penalty_factor * beyond_B / config.len, 0.0)
    rewards_B = rewards_B + penalty_B
    if config.truncated == "zero":
        rewards_B = torch.where(cut_B, 0.0, rewards_B)
    if not config.log or not len(penalty_B):
        return rewards_B, {}
    return rewards_B, {
        "reward/overlong_reward/mean": penalty_B.mean().item(),
        "reward/overlong/mean": punished_B.double().mean().item(),
    }


def _chosen(key: str | None, scores: Scores) -> Tensor:
    """Rows whose reward function returned something true under `key`; all rows without a key: bool [B]."""
    if key is None:
        return torch.ones(len(scores), dtype=torch.bool)
    return torch.tensor([bool(usable_number(extras.get(key))) for extras in scores.extras], dtype=torch.bool)


def reward_components(algorithm: AlgorithmConfig, scores: Scores) -> dict[str, Tensor]:
    """The rewards that gdpo compares besides the score: float64 [B] by name."""
    return {name: extra_numbers(scores, name) for name in component_names(algorithm)}


# ---- normalisation of responses' rewards


def norm_scopes(algorithm: AlgorithmConfig) -> tuple[str | None, str | None]:
    """Scopes of the mean and of the standard deviation, with the short forms written out.

    reward_scaling is running; reward_norm.kind is both, the mean alone with shift, the deviation alone with scale.
    """
    norm, scaling = algorithm.reward_norm, algorithm.reward_scaling
    if scaling.enable:
        return "running" if scaling.center else None, "running"
    if norm.kind is None:
        return norm.mean, norm.std
    if norm.shift:
        return norm.kind, None
    return (None if norm.scale else norm.kind), norm.kind


def reward_norm(
    algorithm: AlgorithmConfig, rewards_B: Tensor, group_B: Tensor, moments: RunningMoments
) -> tuple[Tensor, RunningMoments, dict[str, float]]:
    """(reward - mean) / (std + 1e-6), both over batch, group or all steps: algorithm.reward_norm (ROLL).

    Running moments take this batch in first, then they are used. Standard deviations are unbiased. Where one is 0 (one
    row, equal rewards) nothing is divided: 1e-6 alone would blow the rewards up a million times.
    """
    mean_scope, std_scope = norm_scopes(algorithm)
    metrics: dict[str, float] = {}
    if "running" in (mean_scope, std_scope):
        moments = moments.update(rewards_B)
        metrics = {"critic/running_reward/mean": moments.mean, "critic/running_reward/std": moments.std}
    centred_B = rewards_B
    if mean_scope is not None:
        centred_B = rewards_B - _statistics(mean_scope, rewards_B, group_B, moments)[0]
    if std_scope is None:
        return centred_B, moments, metrics
    std_B = _statistics(std_scope, rewards_B, group_B, moments)[1]
    return torch.where(std_B > NORM_EPS, centred_B / (std_B + NORM_EPS), centred_B), moments, metrics


def _statistics(scope: str, rewards_B: Tensor, group_B: Tensor, moments: RunningMoments) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation that a scope gives each row: two float64 [B]."""
    if scope == "running":
        return torch.full_like(rewards_B, moments.mean), torch.full_like(rewards_B, moments.std)
    groups = group_statistics(rewards_B, group_B if scope == "group" else torch.zeros_like(group_B))
    return groups.of_rows(groups.mean_G), groups.of_rows(groups.std_G)


def agent_norm(rewards_B: Tensor, group_B: Tensor, config: AgentRewardNormConfig) -> Tensor:
    """Normalise rewards over the groups given, by algorithm.agent_reward_norm (RAGEN, arXiv 2504.20073; ROLL's agentic
    pipeline).

    mean: x - mean. mean_std: (x - mean) / (std + 1e-6), 0 in a group of one or without spread. asym_clip: mean_std,
    then clipped to [clip[0], clip[1]].
    """
    groups = group_statistics(rewards_B, group_B)
    centred_B, std_B = rewards_B - groups.of_rows(groups.mean_G), groups.of_rows(groups.std_G)
    if config.method == "mean":
        return centred_B
    scaled_B = torch.where(std_B > NORM_EPS, centred_B / (std_B + NORM_EPS), 0.0)
    return scaled_B.clamp(*config.clip) if config.method == "asym_clip" else scaled_B


def row_groups(rollouts: Rollouts, grouping: str) -> Tensor:
    """Integer id [B] of the rows that algorithm.agent_reward_norm.grouping compares with each other."""
    if grouping == "state":
        return rollouts.group_B
    if grouping == "batch":
        return torch.zeros_like(rollouts.group_B)
    column = "data_source" if grouping == "inductive" else grouping
    values = [_column_value(row, column) for row in rollouts.rows]
    ids = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return torch.tensor([ids[value] for value in values], dtype=torch.int64)


def _column_value(row: PromptRow, column: str) -> str:
    own: dict[str, Any] = {"data_source": row.data_source, "ability": row.ability, "index": row.index}
    if column not in own and column not in row.extra_info:
        raise ValueError(
            f"algorithm.agent_reward_norm.grouping={column}: dataset row {row.index} has no such extra_info column; "
            f"choose state, inductive, batch, {', '.join(own)} or one of {sorted(row.extra_info)}"
        )
    return repr(own[column] if column in own else row.extra_info[column])


# ---- per token


def clip(
    values: Tensor, bound: float | None, metric: str, mask: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Clip values to +-bound, and measure the share (of `mask`) that lay outside. No bound, or 0: no change."""
    if not bound:
        return values, {}
    outside = values.abs() > bound
    considered = outside if mask is None else outside[mask]
    share = considered.double().mean().item() if considered.numel() else 0.0
    return values.clamp(-bound, bound), {metric: share}


def shape_token_rewards(
    algorithm: AlgorithmConfig, token_rewards_T: Tensor, mask_T: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Apply token_reward_clip, then whiten_rewards: the reward of each token as estimators see it, and metrics."""
    rewards_T, metrics = clip(token_rewards_T, algorithm.token_reward_clip, "critic/token_reward_clip_frac", mask_T)
    return (masked_whiten(rewards_T, mask_T) if algorithm.whiten_rewards else rewards_T), metrics


def shape_advantages(
    algorithm: AlgorithmConfig, advantages_T: Tensor, mask_T: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Apply whiten_advantages, then advantage_clip; 0 outside the mask."""
    if algorithm.whiten_advantages:
        advantages_T = masked_whiten(advantages_T, mask_T)
    clipped_T, metrics = clip(advantages_T, algorithm.advantage_clip, "critic/advantage_clip_frac", mask_T)
    return masked_fill_zero(clipped_T, mask_T), metrics


# ---- resampling


def pf_ppo_weights(score_B: Tensor, config: PFPPOConfig) -> Tensor:
    """Weight with which each row is drawn, not normalised: float64 [B], positive (PF-PPO, arXiv 2409.06957; verl)."""
    score_B = score_B.double()
    if config.reweight_method == "pow":
        weight_B = score_B.abs() ** config.weight_pow
    elif config.reweight_method == "max_min":
        weight_B = ((score_B == score_B.max()) | (score_B == score_B.min())).double()
    else:
        weight_B = torch.where(score_B == score_B.max(), 0.4, 0.1).double()
    return weight_B.clamp(1e-8, 1e300)  # all scores 0: every row is as likely; a sum of these is finite


def pf_ppo_rows(score_B: Tensor, config: PFPPOConfig, seed: int) -> tuple[Tensor, dict[str, float]]:
    """Positions of B rows drawn with replacement by score, the same for the same seed, and metrics."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    rows_B = torch.multinomial(pf_ppo_weights(score_B, config), len(score_B), replacement=True, generator=generator)
    return rows_B, {"training/pf_ppo_distinct_rows": len(rows_B.unique()) / len(rows_B)}


def has_signal_B(
    config: FilterGroupsConfig,
    reward_model: RewardModelConfig,
    rollouts: Rollouts,
    scores: Scores,
    max_response_length: int,
) -> Tensor:
    """True for the rows whose group passes: bool [B], the same for all rows of a group.

    range: lo < mean of the metric < hi (Colossal-RL's filter_range). std: standard deviation above std_threshold, by
    default 0 unless range is set (DAPO; ROLL's std_filter). Both, if both are set. Only rows that can be trained on
    and have the metric count, those of an episode once; a group with fewer than two has nothing to compare and does not
    pass.
    """
    kept_B = trainable_B(rollouts, scores)
    kept, kept_scores = whole_episodes(rollouts.select(kept_B), scores.select(kept_B))
    if config.metric in (None, "score"):
        values_B = kept_scores.score_B.double()
    elif config.metric in SHAPED_REWARDS:
        values_B, _ = response_rewards(reward_model, kept, kept_scores, max_response_length)
    else:
        values_B = extra_numbers(kept_scores, config.metric)
    known_B = values_B.isfinite()
    kept, values_B = kept.select(known_B), values_B[known_B]
    # float32: sums of a group's equal values are then exact in float64, and its deviation is exactly 0
    groups = group_statistics(values_B.float(), kept.group_B)
    passes_G = groups.size_G > 1
    threshold = config.std_threshold
    if config.range is not None:
        low, high = config.range
        passes_G &= (groups.mean_G > low) & (groups.mean_G < high)
    elif threshold is None:
        threshold = 0.0
    if threshold is not None:
        passes_G &= groups.std_G > threshold
    passing = kept.group_B[groups.of_rows(passes_G)]
    return torch.isin(rollouts.group_B, passing)


def large_enough_B(rollouts: Rollouts, scores: Scores, least: int) -> Tensor:
    """True for the rows whose group has so many responses with a score (algorithm.min_group_size): bool [B]."""
    episodes, graded = whole_episodes(rollouts, scores)
    groups = group_statistics(graded.valid_B.float(), episodes.group_B)
    enough_G = groups.sums_of(graded.valid_B.float()) >= least
    return torch.isin(rollouts.group_B, episodes.group_B[groups.of_rows(enough_G)])
