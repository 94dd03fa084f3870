"""Preparation of whole batches by the actor's options, before they are cut and sent to the ranks. Pure, on the driver.

Everything here is a statistic of, or a choice among, the rows of a rollout batch or of a mini-batch: micro-batches and
ranks are cut afterwards and cannot change it.

clip_cov and kl_cov (Cui et al. 2025, arXiv 2505.22617) act on tokens by their covariance (A - mean A)(log_prob - mean
log_prob), means over the mini-batch's sampled tokens. It is taken with the OLD log-probs, once per mini-batch: so no
cut into micro-batches and no number of ranks changes who is chosen. (verl takes the current log-probs and each
micro-batch on its own.)
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from verl_like.algorithms.masked import masked_fill_zero, masked_mean
from verl_like.batch import Episodes, Experience, Rollouts
from verl_like.config import ActorConfig, SampleWeightConfig

LENGTH_EPS = 1e-8  # rows of one length all get weight 1.5, which normalisation turns into 1


def prepare_batch(experience: Experience, actor: ActorConfig) -> Experience:
    """Add the sample weights whose scope is the rollout batch. Rows that mask_truncated will leave out have none."""
    if actor.sample_weight.scope != "batch":
        return experience
    trained_B = ~_left_out(experience, actor)
    weight_B = sample_weights(experience.select(trained_B), actor.sample_weight)
    if weight_B is None:
        return experience
    return experience.replace(sample_weight_B=weight_B.new_zeros(len(experience)).masked_scatter(trained_B, weight_B))


def prepare_minibatch(rows: Experience, actor: ActorConfig, seed: Seed) -> Experience:
    """Prepare the rows of one optimizer step: leave out truncated ones, add weights of scope mini_batch, select tokens.

    No row may be left. `seed` must differ between mini-batches and not depend on ranks.
    """
    rows = rows.select(~_left_out(rows, actor))
    weight_B = rows.sample_weight_B
    if actor.sample_weight.scope == "mini_batch":
        weight_B = sample_weights(rows, actor.sample_weight)
    return rows.replace(sample_weight_B=weight_B, selected_T=select_tokens(rows, actor, seed) if len(rows) else None)


def _left_out(rows: Experience, actor: ActorConfig) -> Tensor:
    """True for the rows that the update must not see: bool [B]."""
    if not actor.mask_truncated:
        return rows.response_mask_T.new_zeros(len(rows))
    if rows.truncated_B is None:
        raise ValueError("actor_rollout_ref.actor.mask_truncated=True needs finish reasons, but the batch has none")
    return rows.truncated_B


Seed = tuple[int, ...]


def difficulties(rollouts: Rollouts, options: SampleWeightConfig) -> Tensor | None:
    """extra_info[difficulty_key] of each row, float32 [B]; None when weights by difficulty are off.

    Rows without a number there have failed before: see `complete`.
    """
    if not options.difficulty:
        return None
    return torch.tensor([float(row.extra_info[options.difficulty_key]) for row in rollouts.rows])


def sample_weights(rows: Experience, options: SampleWeightConfig) -> Tensor | None:
    """Weight of each row in the loss (actor.sample_weight), float32 [B] of mean 1, or None when both kinds are off.

    Of a whole mini-batch or rollout batch, never of a micro-batch: there, with one row, all weights would be 1.

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


def select_tokens(rows: Experience, actor: ActorConfig, seed: Seed) -> Tensor | None:
    """Select the tokens on which the loss acts, bool [T]; None for losses that select nothing.

    The same rows in the same order with the same seed give the same tokens.
    """
    loss = actor.policy_loss.loss
    if not loss.selects:
        return None
    mask_T = rows.response_mask_T
    chosen = loss.load(loss.selects)(token_covariance(rows)[mask_T], actor, seed)
    selected_T = torch.zeros_like(mask_T)
    selected_T[mask_T.nonzero().flatten()[chosen]] = True
    return selected_T


def token_covariance(rows: Experience) -> Tensor:
    """(A - mean A)(old - mean old) of each token, float64 [T]; 0 outside the mask."""
    if rows.old_log_probs_T is None:
        raise ValueError(
            "clip_cov and kl_cov select tokens by old log-probs: set actor_rollout_ref.actor.old_log_probs=recompute"
        )
    mask_T, advantages_T, old_T = rows.response_mask_T, rows.advantages_T.double(), rows.old_log_probs_T.double()
    product_T = (advantages_T - masked_mean(advantages_T, mask_T)) * (old_T - masked_mean(old_T, mask_T))
    return masked_fill_zero(product_T, mask_T)


def clip_cov(covariance_N: Tensor, actor: ActorConfig, seed: Seed) -> Tensor:
    """clip_cov_ratio of all tokens, drawn from those with clip_cov_lb < covariance < clip_cov_ub."""
    options = actor.policy_loss
    inside = (covariance_N > options.clip_cov_lb) & (covariance_N < options.clip_cov_ub)
    candidates = inside.nonzero().flatten()
    digest = hashlib.sha256(repr(seed).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) % 2**63)
    order = torch.randperm(len(candidates), generator=generator)
    return candidates[order[: _quota(options.clip_cov_ratio, len(covariance_N))]]


def kl_cov(covariance_N: Tensor, actor: ActorConfig, seed: Seed) -> Tensor:
    """The kl_cov_ratio of all tokens with the largest covariance; among equals the first."""
    order = torch.argsort(covariance_N, descending=True, stable=True)
    return order[: _quota(actor.policy_loss.kl_cov_ratio, len(covariance_N))]


def _quota(share: float, num_tokens: int) -> int:
    """Number of tokens in the share: at least one, unless the share is 0."""
    return max(int(share * num_tokens), 1) if share > 0 else 0
