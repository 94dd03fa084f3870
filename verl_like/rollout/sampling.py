"""Sampling parameters from the config (`rollout.*`, `rollout.val_kwargs.*`), and sampling itself for the hf engine."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.config import RolloutConfig
from verl_like.rollout.rollout_engine import SamplingParams


def train_sampling(rollout: RolloutConfig, eos_ids: tuple[int, ...]) -> SamplingParams:
    """How training responses are drawn."""
    return _sampling(rollout, eos_ids, rollout.temperature, rollout.top_p, rollout.top_k, do_sample=rollout.do_sample)


def validation_sampling(rollout: RolloutConfig, eos_ids: tuple[int, ...]) -> SamplingParams:
    """How validation responses are drawn: `rollout.val_kwargs`, else as in training."""
    val = rollout.val_kwargs
    return _sampling(rollout, eos_ids, val.temperature, val.top_p, val.top_k, do_sample=val.do_sample)


def _sampling(
    rollout: RolloutConfig, eos_ids: tuple[int, ...], temperature: float, top_p: float, top_k: int, *, do_sample: bool
) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k if top_k > 0 else -1,
        max_tokens=rollout.response_length,
        ignore_eos=rollout.ignore_eos,
        stop_token_ids=eos_ids,
        do_sample=do_sample,
    )


def filtered_log_probs(logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Log-probs [B, V] float32 of the distribution that is sampled from: temperature, then top-k, then top-p.

    top_k_B int64, V or more is off; top_p_B 1.0 is off. Ties at the k-th place are all kept, as vLLM does; top-p keeps
    the smallest set of most likely tokens whose probability reaches p, never none.
    """
    logits_BV = logits_BV.float() / temperature_B[:, None]
    vocab = logits_BV.shape[1]
    if bool((top_k_B < vocab).any()) or bool((top_p_B < 1.0).any()):
        sorted_BV, order_BV = logits_BV.sort(dim=-1)
        kth_B1 = sorted_BV.gather(1, (vocab - top_k_B.clamp(1, vocab))[:, None])
        sorted_BV = sorted_BV.masked_fill(sorted_BV < kth_B1, -torch.inf)
        cumulative_BV = sorted_BV.softmax(dim=-1).cumsum(dim=-1)
        dropped_BV = cumulative_BV <= 1 - top_p_B[:, None]
        dropped_BV[:, -1] = False
        dropped_BV &= (top_p_B < 1.0)[:, None]
        logits_BV = torch.empty_like(logits_BV).scatter_(1, order_BV, sorted_BV.masked_fill(dropped_BV, -torch.inf))
    return logits_BV.log_softmax(dim=-1)


def draw(log_probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Token ids [B] by inverse transform of one uniform number per row (float64, in [0, 1)).

    One number decides one token, so a tiny numerical difference in the probabilities (another batch, another padding)
    changes the token only if the number lies within that difference of a boundary.
    """
    cumulative_BV = log_probs_BV.double().exp().cumsum(dim=-1)
    target_B1 = uniform_B.to(cumulative_BV)[:, None] * cumulative_BV[:, -1:]
    chosen_B = torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0]
    return chosen_B.clamp(max=log_probs_BV.shape[1] - 1)
