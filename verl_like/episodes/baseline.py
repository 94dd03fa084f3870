"""ReMax's baseline (algorithm.adv_estimator=remax): the reward of a greedy response to each prompt of the batch.

The greedy responses are graded, and never trained on.
"""

from __future__ import annotations

import torch

from verl_like.algorithms.reward_shaping import baseline_rewards
from verl_like.batch import Rollouts, Scores, whole_episodes
from verl_like.config import PPOConfig


def with_baseline(
    config: PPOConfig, rollouts: Rollouts, scores: Scores, greedy: Rollouts, greedy_scores: Scores
) -> tuple[Scores, int]:
    """The batch's scores with baseline_B, and how many of `greedy`, one episode of each prompt, have no score.

    A row whose baseline could not be graded has no advantage: it is not valid.
    """
    limit = config.data.max_response_length
    greedy, greedy_scores = whole_episodes(greedy, greedy_scores)
    reward_G = baseline_rewards(config.algorithm, config.reward_model, greedy, greedy_scores, limit)
    place = {group: place for place, group in enumerate(greedy.group_B.tolist())}
    baseline_B = reward_G[torch.tensor([place[group] for group in rollouts.group_B.tolist()], dtype=torch.long)]
    known_B = ~baseline_B.isnan()
    scores = scores.replace(
        score_B=torch.where(known_B, scores.score_B, torch.full_like(scores.score_B, torch.nan)),
        valid_B=scores.valid_B & known_B,
        baseline_B=baseline_B,
    )
    return scores, int(reward_G.isnan().sum())
