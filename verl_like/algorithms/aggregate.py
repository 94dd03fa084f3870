"""Aggregation of a per-token loss to one number: actor.loss_agg_mode.

Every mode returns the given rows' SUM over a GLOBAL denominator, counted over the whole mini-batch and all ranks before
any backward pass. So contributions of micro-batches and ranks simply add up, and no cut changes loss or gradient.
Denominators count what the driver decided to train on: rows without a sampled token stay in num_sequences and add 0.
A sequence is an episode: one row, or several, whose sums add up and whose mean is one over all their tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from verl_like.algorithms.masked import masked_mean, masked_sum
from verl_like.algorithms.registry import Registry
from verl_like.batch import Denominators
from verl_like.config import menus

AggregateFunction = Callable[[Tensor, Tensor, Denominators, float, Tensor | None], Tensor]
AGGREGATIONS: Registry[AggregateFunction] = Registry("loss_agg_mode", menus.AGGREGATIONS)


def aggregate(
    loss_BR: Tensor,
    mask_BR: Tensor,
    mode: str,
    denominators: Denominators,
    loss_scale_factor: float | None = None,
    episode_tokens_B: Tensor | None = None,
) -> Tensor:
    """Reduce the losses of these rows to their contribution to the mini-batch's loss, a scalar.

    Args:
        loss_BR: loss of each token.
        mask_BR: bool; true for tokens that count.
        mode: name of the aggregation, as in actor.loss_agg_mode.
        denominators: counts over the whole mini-batch and all ranks.
        loss_scale_factor: read by seq-mean-token-sum-norm only; None means data.max_response_length, a constant of the
            run, never the width of this batch.
        episode_tokens_B: read by seq-mean-token-mean only: tokens of the row's episode in all its rows, wherever these
            are; None means that every row is an episode.
    """
    scale = float(denominators.max_response_length) if loss_scale_factor is None else loss_scale_factor
    return AGGREGATIONS.lookup(mode)(loss_BR, mask_BR, denominators, scale, episode_tokens_B)


def token_mean(loss_BR: Tensor, mask_BR: Tensor, denominators: Denominators, *_: object) -> Tensor:
    """Mean over all tokens: each counts the same (DAPO, arXiv 2503.14476)."""
    return masked_sum(loss_BR, mask_BR) / max(denominators.num_tokens, 1)


def token_sum(loss_BR: Tensor, mask_BR: Tensor, denominators: Denominators, *_: object) -> Tensor:
    """Plain sum: the gradient grows with the batch."""
    return masked_sum(loss_BR, mask_BR)


def seq_mean_token_sum(loss_BR: Tensor, mask_BR: Tensor, denominators: Denominators, *_: object) -> Tensor:
    """Sum over an episode's tokens, mean over episodes."""
    return masked_sum(loss_BR, mask_BR) / max(denominators.num_sequences, 1)


def seq_mean_token_mean(
    loss_BR: Tensor, mask_BR: Tensor, denominators: Denominators, scale: float, episode_tokens_B: Tensor | None
) -> Tensor:
    """Mean over an episode's tokens, mean over episodes: each counts the same (GRPO as published)."""
    if episode_tokens_B is None:
        return masked_mean(loss_BR, mask_BR, dim=1).sum() / max(denominators.num_sequences, 1)
    shares_B = masked_sum(loss_BR, mask_BR, dim=1) / episode_tokens_B.clamp(min=1)
    return shares_B.sum() / max(denominators.num_sequences, 1)


def seq_mean_token_sum_norm(
    loss_BR: Tensor, mask_BR: Tensor, denominators: Denominators, scale: float, *_: object
) -> Tensor:
    """Sum over an episode's tokens divided by a constant, mean over episodes (Dr. GRPO, arXiv 2503.20783)."""
    return seq_mean_token_sum(loss_BR, mask_BR, denominators, scale, None) / scale
