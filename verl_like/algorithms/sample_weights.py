"""Weights of rows in the policy loss: actor.sample_weight.* (ROLL's difficulty_loss_weight and length_loss_weight).

Computed on the driver over a whole mini-batch (or rollout batch), never over a micro-batch: there, with one row each,
normalised weights would all be 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.batch import Episodes, Experience, Rollouts
from verl_like.config import SampleWeightConfig

LENGTH_EPS = 1e-8  # rows of one length all get weight 1.5, which normalisation turns into 1


def difficulties(rollouts: Rollouts, options: SampleWeightConfig) -> Tensor | None:
    """extra_info[difficulty_key] of each row, float32 [B]; None when weights by difficulty are off.

    Rows without a number there have failed before: see `complete`.
    """
    if not options.difficulty:
        return None
    return torch.tensor([float(row.extra_info[options.difficulty_key]) for row in rollouts.rows])


def sample_weights(rows: Experience, options: SampleWeightConfig) -> Tensor | None:
    """Weight of each row, float32 [B] of mean 1, or None when both kinds are off.

    difficulty: 0.5 + 1.5 * clip(difficulty, 0, 1). length: 1.5 - (T - T_min) / (T_max - T_min + 1e-8), T the response's
    length, whatever a correction rejected of it. Both together multiply. Then w *= B / sum(w) over the given rows.
    Rows of one episode have its weight: T is its length, and B counts episodes. Source: ROLL (actor worker), which does
    it per micro-batch.
    """
    if not (options.difficulty or options.length) or not len(rows):
        return None
    episodes = Episodes.of(rows)
    weight_B = torch.ones(len(episodes))
    if options.difficulty:
        if rows.difficulty_B is None:
            raise ValueError("sample_weight.difficulty=True needs difficulties, but the batch has none")
        weight_B = weight_B * (0.5 + 1.5 * episodes.once(rows.difficulty_B).clamp(0.0, 1.0))
    if options.length:
        length_B = episodes.sums(rows.response_length_B).float()
        spread = length_B.max() - length_B.min() + LENGTH_EPS
        weight_B = weight_B * (1.5 - (length_B - length_B.min()) / spread)
    return episodes.of_rows(weight_B * len(episodes) / weight_B.sum())
