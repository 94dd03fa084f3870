"""Advantage estimators: from token rewards to credit. One function each, chosen by algorithm.adv_estimator.

To add one: write `f(inputs, algorithm) -> AdvantageOutputs` under `@register_advantage("name")`, test it against hand
values and a naive loop, and give it a section in docs/algorithms.md (a test asks for it). Statistics are those of the
whole rollout batch: estimators run on the driver, before anything is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_like.algorithms.groups import group_statistics
from verl_like.algorithms.masked import masked_fill_zero, masked_sum, masked_whiten
from verl_like.algorithms.registry import Registry
from verl_like.config import AlgorithmConfig

GRPO_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What estimators may look at. Optional columns are there when the run has them."""

    token_rewards_BR: Tensor  # float32: reward after KL, on the token that earned it, 0 elsewhere
    response_mask_BR: Tensor  # bool: tokens the policy sampled
    group_B: Tensor  # int64: rows with the same number answer the same prompt
    values_BR: Tensor | None = None  # V(state before token t), from the critic
    old_log_probs_BR: Tensor | None = None

    def reward_B(self) -> Tensor:
        """Reward of the whole response."""
        return masked_sum(self.token_rewards_BR, self.response_mask_BR, dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOutputs:
    """Both are 0 outside response_mask."""

    advantages_BR: Tensor
    returns_BR: Tensor
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


AdvantageFunction = Callable[[AdvantageInputs, AlgorithmConfig], AdvantageOutputs]
ADVANTAGES: Registry[AdvantageFunction] = Registry("algorithm.adv_estimator")
register_advantage = ADVANTAGES.register


def compute_advantages(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Run the estimator that algorithm.adv_estimator names."""
    return ADVANTAGES.lookup(algorithm.adv_estimator)(inputs, algorithm)


def over_tokens(values_B: Tensor, mask_BR: Tensor) -> Tensor:
    """One value per row, written on each of its sampled tokens: float32 [B, R]."""
    return values_B.float()[:, None] * mask_BR


@register_advantage("gae")
def gae(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Generalized advantage estimation, whitened over all tokens (Schulman et al. 2016, arXiv 1506.02438).

    A token outside the mask (tool text) is stepped over: the value and the running sum of the next sampled token are
    carried on undiscounted, so a multi-turn row equals the same row with its tool text cut out.
    """
    if inputs.values_BR is None:
        raise ValueError(
            "algorithm.adv_estimator='gae' needs values, but this run has no critic; use 'grpo' or add one"
        )
    rewards, values, mask = inputs.token_rewards_BR, inputs.values_BR, inputs.response_mask_BR
    next_value = next_advantage = torch.zeros(len(rewards), dtype=rewards.dtype, device=rewards.device)
    backwards: list[Tensor] = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + algorithm.gamma * next_value - values[:, t]
        advantage = delta + algorithm.gamma * algorithm.lam * next_advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        backwards.append(next_advantage)
    raw_BR = torch.stack(backwards[::-1], dim=1) if backwards else torch.zeros_like(rewards)
    returns_BR = masked_fill_zero(raw_BR + values, mask)
    return AdvantageOutputs(advantages_BR=masked_whiten(raw_BR, mask), returns_BR=returns_BR)


@register_advantage("grpo")
def grpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """(reward - group mean) / (group std + 1e-6) on every token (DeepSeekMath, arXiv 2402.03300).

    norm_adv_by_std_in_grpo=False leaves the division out (Dr. GRPO, arXiv 2503.20783). A group of one has nothing to be
    compared with: its advantage is 0 (verl gives it its reward).
    """
    reward_B = inputs.reward_B()
    groups = group_statistics(reward_B, inputs.group_B)
    advantage_B = reward_B.double() - groups.of_rows(groups.mean_G)
    if algorithm.norm_adv_by_std_in_grpo:
        advantage_B = advantage_B / (groups.of_rows(groups.std_G) + GRPO_EPS)
    advantages_BR = over_tokens(advantage_B, inputs.response_mask_BR)
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR)
