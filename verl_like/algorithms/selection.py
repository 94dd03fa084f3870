"""Which tokens of a mini-batch clip_cov and kl_cov act on (Cui et al. 2025, arXiv 2505.22617). Pure, on the driver.

The covariance of a token is (A - mean A)(log_prob - mean log_prob), means over the mini-batch's sampled tokens. It is
taken with the OLD log-probs, once per mini-batch: so no cut into micro-batches and no number of ranks changes who is
chosen. (verl takes the current log-probs and each micro-batch on its own.)
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from verl_like.algorithms.masked import masked_fill_zero, masked_mean
from verl_like.batch import Experience
from verl_like.config import ActorConfig

Seed = tuple[int, ...]


def select_tokens(rows: Experience, actor: ActorConfig, seed: Seed) -> Tensor | None:
    """bool [B, R], true where the loss acts on the token; None for losses that select nothing.

    The same rows in the same order with the same seed give the same tokens.
    """
    select = {"clip_cov": _clip_cov, "kl_cov": _kl_cov}.get(actor.policy_loss.loss_mode)
    if select is None:
        return None
    covariance_BR = token_covariance(rows)
    mask_BR = rows.response_mask_BR
    chosen = select(covariance_BR[mask_BR], actor, seed)
    tokens = torch.zeros(int(mask_BR.sum()), dtype=torch.bool)
    tokens[chosen] = True
    return torch.zeros_like(mask_BR).masked_scatter(mask_BR, tokens)


def token_covariance(rows: Experience) -> Tensor:
    """(A - mean A)(old - mean old) of each token, float64 [B, R]; 0 outside the mask."""
    if rows.old_log_probs_BR is None:
        raise ValueError(
            "clip_cov and kl_cov select tokens by old log-probs: set actor_rollout_ref.actor.old_log_probs=recompute"
        )
    mask_BR = rows.response_mask_BR
    advantages_BR, old_BR = rows.advantages_BR.double(), rows.old_log_probs_BR.double()
    product_BR = (advantages_BR - masked_mean(advantages_BR, mask_BR)) * (old_BR - masked_mean(old_BR, mask_BR))
    return masked_fill_zero(product_BR, mask_BR)


def _clip_cov(covariance_N: Tensor, actor: ActorConfig, seed: Seed) -> Tensor:
    """clip_cov_ratio of all tokens, drawn from those with clip_cov_lb < covariance < clip_cov_ub."""
    options = actor.policy_loss
    inside = (covariance_N > options.clip_cov_lb) & (covariance_N < options.clip_cov_ub)
    candidates = inside.nonzero().flatten()
    digest = hashlib.sha256(repr(seed).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) % 2**63)
    order = torch.randperm(len(candidates), generator=generator)
    return candidates[order[: _quota(options.clip_cov_ratio, len(covariance_N))]]


def _kl_cov(covariance_N: Tensor, actor: ActorConfig, seed: Seed) -> Tensor:
    """The kl_cov_ratio of all tokens with the largest covariance; among equals the first."""
    order = torch.argsort(covariance_N, descending=True, stable=True)
    return order[: _quota(actor.policy_loss.kl_cov_ratio, len(covariance_N))]


def _quota(share: float, num_tokens: int) -> int:
    """At least one token, unless the share is 0."""
    return max(int(share * num_tokens), 1) if share > 0 else 0
