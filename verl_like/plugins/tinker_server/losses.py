"""Losses of the protocol, each a sum over tokens and targets: what it is to be divided by is in the client's weights.

With p the policy's log-prob of a target, q that of the sampler, r = exp(p - q), A the advantage:
    cross_entropy         -w p
    importance_sampling   -r A
    ppo                   -min(r A, clip(r, low, high) A)
    cispo                 -sg(clip(r, low, high)) A p              sg: no gradient; arXiv 2506.13585, eq. 4
    dro                   -(p A - beta / 2 (p - q)^2)              arXiv 2405.19107
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
_PPO, _CISPO = {LOW: 0.8, HIGH: 1.2}, {LOW: 0.0, HIGH: 4.0}


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss. inputs: columns that its rows must have; settings: numbers of loss_fn_config, with their defaults.

    A setting may come as a column of the rows instead.
    """

    inputs: tuple[str, ...]
    settings: Mapping[str, float]
    of_tokens: Callable[[Tensor, Mapping[str, Any]], Tensor]


def _cross_entropy(p: Tensor, rows: Mapping[str, Any]) -> Tensor:
    return -rows["weights"] * p


def _importance_sampling(p: Tensor, rows: Mapping[str, Any]) -> Tensor:
    return -torch.exp(p - rows["logprobs"]) * rows["advantages"]


def _clipped(ratio: Tensor, rows: Mapping[str, Any]) -> Tensor:
    return torch.minimum(torch.maximum(ratio, rows[LOW]), rows[HIGH])


def _ppo(p: Tensor, rows: Mapping[str, Any]) -> Tensor:
    ratio = torch.exp(p - rows["logprobs"])
    return -torch.minimum(ratio * rows["advantages"], _clipped(ratio, rows) * rows["advantages"])


def _cispo(p: Tensor, rows: Mapping[str, Any]) -> Tensor:
    ratio = torch.exp(p.detach() - rows["logprobs"])
    return -_clipped(ratio, rows) * rows["advantages"] * p


def _dro(p: Tensor, rows: Mapping[str, Any]) -> Tensor:
    return -(p * rows["advantages"] - rows["beta"] / 2 * (p - rows["logprobs"]) ** 2)


_SAMPLED = ("logprobs", "advantages")
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(("weights",), {}, _cross_entropy),
    "importance_sampling": Loss(_SAMPLED, {}, _importance_sampling),
    "ppo": Loss(_SAMPLED, _PPO, _ppo),
    "cispo": Loss(_SAMPLED, _CISPO, _cispo),
    "dro": Loss(_SAMPLED, {"beta": 0.05}, _dro),
}
