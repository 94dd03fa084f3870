"""Filter of prompt groups without a signal: algorithm.filter_groups (dynamic sampling, DAPO, arXiv 2503.14476, 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.algorithms.completeness import SHAPED_REWARDS, extra_numbers
from verl_like.algorithms.groups import group_statistics
from verl_like.algorithms.reward_shaping import response_rewards, trainable_B
from verl_like.batch import Rollouts, Scores, whole_episodes
from verl_like.config import FilterGroupsConfig, RewardModelConfig


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
