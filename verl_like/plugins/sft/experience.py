"""Rows as the engine takes them, and the loss on them. A further objective brings a loss of its own for such rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_like.algorithms.aggregate import aggregate
from verl_like.algorithms.masked import masked_sum
from verl_like.algorithms.objectives import as_metrics
from verl_like.batch import Denominators, Experience, Metric
from verl_like.config import PPOConfig
from verl_like.config.menus import DEFAULT_AGGREGATION
from verl_like.plugins.sft.turns import Row


class Imitation:
    """Objective of the workers: -log p of the trained tokens, joined by actor.loss_agg_mode (null: their mean)."""

    wants = frozenset({"log_probs"})

    def __init__(self, config: PPOConfig) -> None:
        actor = config.actor_rollout_ref.actor
        self.mode, self.scale = actor.loss_agg_mode or DEFAULT_AGGREGATION, actor.loss_scale_factor

    def without_gradient(self, experience: Experience) -> None:
        """Say that every row may be learnt from."""

    def __call__(
        self, outputs: dict[str, Tensor], experience: Experience, denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the micro-batch's share of the loss; metrics: the loss, and the mean -log p of a token."""
        mask_BR, loss_BR = experience.response_mask_BR, -outputs["log_probs"]
        loss = aggregate(loss_BR, mask_BR, self.mode, denominators, self.scale, experience.episode_tokens_B)
        mean = masked_sum(loss_BR.detach(), mask_BR) / max(denominators.num_tokens, 1)
        return loss, as_metrics({"loss": loss, "train/loss": mean})


def experience_of(conversations: Sequence[Sequence[Row]], numbers: Sequence[int]) -> Experience:
    """Make rows with a prompt, up to the first trained token, and a response, the rest, of which a mask says more.

    Args:
        conversations: rows of each; those without a trained token behind a first one are left out.
        numbers: of each conversation, unique in the run. Rows of one conversation count as one sequence.
    """
    rows, groups = list[tuple[Row, int]](), list[int]()
    for conversation, number in zip(conversations, numbers, strict=True):
        for row in conversation:
            if (trained := np.flatnonzero(row.trained[1:])).size:
                rows.append((row, int(trained[0]) + 1))
                groups.append(number)
    group_B, columns = torch.tensor(groups, dtype=torch.int64), columns_of(rows)
    return Experience(
        **columns,
        group_B=group_B,
        episode_B=group_B if len(set(groups)) < len(groups) else None,
        advantages_T=columns["response_mask_T"].float(),
    )


def columns_of(rows: Sequence[tuple[Row, int]]) -> dict[str, Any]:
    """Make the columns of Sequences of rows, each with the number of tokens that are its prompt."""
    return {
        "prompt_ids_T": _column([row.ids[:start] for row, start in rows], torch.int32),
        "prompt_length_B": torch.tensor([start for _, start in rows], dtype=torch.int64),
        "response_ids_T": _column([row.ids[start:] for row, start in rows], torch.int32),
        "response_length_B": torch.tensor([len(row.ids) - start for row, start in rows], dtype=torch.int64),
        "response_mask_T": _column([row.trained[start:] for row, start in rows], torch.bool),
        "media": [list(row.media) for row, _ in rows] if any(row.media for row, _ in rows) else None,
    }


def _column(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    """Join what each row has."""
    return torch.from_numpy(np.concatenate(parts)).to(dtype) if parts else torch.zeros(0, dtype=dtype)
