"""Advantage estimators: from token rewards to credit. One function each, chosen by algorithm.adv_estimator.

To add one: CONTRIBUTING.md has the steps; for a run of one's own algorithm.adv_estimator=file.py:name does. Statistics
are those of the whole rollout batch: estimators run on the driver, before anything is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_like.algorithms.groups import GroupStatistics, group_statistics
from verl_like.algorithms.masked import masked_fill_zero, masked_sum, masked_whiten, row_blocks
from verl_like.algorithms.registry import Registry
from verl_like.algorithms.stepwise import Turns, anchor_advantages, normalised_by_group, turn_returns, turns_of
from verl_like.config import AlgorithmConfig

GRPO_EPS = 1e-6
_GAE_BLOCK = 2**23  # entries of a block of rows: fewer rows would make more steps of the loop over tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What estimators may look at. Optional columns are there when the run has them.

    A row is a whole episode: one whose history was rewritten comes joined to one row (see algorithms/experience.py).
    """

    token_rewards_BR: Tensor  # float32: reward after KL, on the token that earned it, 0 elsewhere
    response_mask_BR: Tensor  # bool: tokens the policy sampled
    group_B: Tensor  # int64: rows with the same number answer the same prompt
    values_BR: Tensor | None = None  # V(state before token t), from the critic
    old_log_probs_BR: Tensor | None = None
    components: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # float64 [B]: rewards by name, for gdpo
    step_BR: Tensor | None = None  # turn of each sampled token, and state before the turn: see algorithms/stepwise.py
    anchor_BR: Tensor | None = None
    sum_pi_squared_BR: Tensor | None = None  # over the vocabulary, of squared probabilities, under the old policy
    importance_weights_BR: Tensor | None = None  # of algorithm.rollout_correction, where the driver has them
    baseline_B: Tensor | None = None  # reward of the greedy response to the row's prompt

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
ADVANTAGES: Registry[AdvantageFunction] = Registry("algorithm.adv_estimator", arguments=("inputs", "algorithm"))
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
    carried on undiscounted, so a multi-turn row equals the same row with its tool text cut out. So they are where an
    episode goes on in another row: the state after a row's last token is the next row's prompt.
    """
    if inputs.values_BR is None:
        raise ValueError(
            "algorithm.adv_estimator='gae' needs values, but this run has no critic; use 'grpo' or add one"
        )
    rewards, values, mask = inputs.token_rewards_BR, inputs.values_BR, inputs.response_mask_BR
    raw_BR = torch.empty_like(rewards)
    for rows in row_blocks(rewards.shape, _GAE_BLOCK):  # time first: what one step reads lies together
        rewards_RB, values_RB, mask_RB = (column[rows].T.contiguous() for column in (rewards, values, mask))
        raw_RB = torch.empty_like(rewards_RB)
        next_value = next_advantage = rewards.new_zeros(rewards_RB.shape[1])
        for t in reversed(range(len(rewards_RB))):
            delta = rewards_RB[t] + algorithm.gamma * next_value - values_RB[t]
            advantage = delta + algorithm.gamma * algorithm.lam * next_advantage
            next_value = torch.where(mask_RB[t], values_RB[t], next_value)
            next_advantage = torch.where(mask_RB[t], advantage, next_advantage)
            raw_RB[t] = next_advantage
        raw_BR[rows] = raw_RB.T
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


# ---- one advantage per response, from the rewards of its group. A group of one has nothing to be compared with: 0.


def on_all_tokens(advantage_B: Tensor, inputs: AdvantageInputs) -> AdvantageOutputs:
    """The row's advantage on each of its sampled tokens, as returns too."""
    advantages_BR = over_tokens(advantage_B, inputs.response_mask_BR)
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR)


def above_group_mean(inputs: AdvantageInputs) -> tuple[Tensor, GroupStatistics]:
    """reward - group mean (float64 [B]), and the statistics of the groups' rewards."""
    reward_B = inputs.reward_B()
    groups = group_statistics(reward_B, inputs.group_B)
    return reward_B.double() - groups.of_rows(groups.mean_G), groups


@register_advantage("dr_grpo")
def dr_grpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """reward - group mean: grpo without the division, whatever norm_adv_by_std_in_grpo says (arXiv 2503.20783)."""
    return on_all_tokens(above_group_mean(inputs)[0], inputs)


@register_advantage("rloo")
def rloo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """reward - mean reward of the others in the group (RLOO, Ahmadian et al. 2024, arXiv 2402.14740)."""
    difference_B, groups = above_group_mean(inputs)
    size_B = groups.of_rows(groups.size_G)
    return on_all_tokens(difference_B * size_B / (size_B - 1).clamp(min=1), inputs)


@register_advantage("opo")
def opo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """reward - length-weighted mean reward of the group (OPO's optimal baseline, Hao et al. 2025, arXiv 2505.23585)."""
    reward_B, length_B = inputs.reward_B().double(), inputs.response_mask_BR.sum(dim=1).double()
    groups = group_statistics(reward_B, inputs.group_B)
    baseline_G = groups.sums_of(reward_B * length_B) / groups.sums_of(length_B).clamp(min=1)
    return on_all_tokens(reward_B - groups.of_rows(baseline_G), inputs)


@register_advantage("gpg")
def gpg(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """alpha * (reward - group mean), alpha = rows / rows of groups whose rewards differ (GPG, arXiv 2504.02546).

    alpha makes up for groups without a signal. (verl counts rows with a non-zero reward instead, which depends on where
    the zero of the reward is.)
    """
    difference_B, groups = above_group_mean(inputs)
    with_signal = (groups.of_rows(groups.std_G) > 0).sum().clamp(min=1)
    return on_all_tokens(difference_B * len(difference_B) / with_signal, inputs)


@register_advantage("grpo_passk")
def grpo_passk(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Best reward - second best on the group's best row, 0 on the others (pass@k, Tang et al. 2025, arXiv 2503.19595).

    Divided by (group std + 1e-6) unless norm_adv_by_std_in_grpo is false. A tie for the best gives 0.
    """
    reward_B = inputs.reward_B().double()
    groups = group_statistics(reward_B, inputs.group_B)
    advantage_B = torch.zeros_like(reward_B)
    for group in (groups.size_G > 1).nonzero().flatten():
        rows = (groups.row_group_B == group).nonzero().flatten()
        (best, second), index = reward_B[rows].topk(2)
        advantage_B[rows[index[0]]] = best - second
    if algorithm.norm_adv_by_std_in_grpo:
        advantage_B = advantage_B / (groups.of_rows(groups.std_G) + GRPO_EPS)
    return on_all_tokens(advantage_B, inputs)


@register_advantage("maxrl")
def maxrl(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """(reward - group mean) / (group mean + 1e-6) (MaxRL, Tajwar et al. 2026, arXiv 2602.02710).

    For rewards that are 0 or more, such as 0/1 correctness: a negative one, of the score or of the KL penalty, would
    turn the sign of a whole group and is an error.
    """
    difference_B, groups = above_group_mean(inputs)
    lowest = inputs.reward_B().min().item() if len(difference_B) else 0.0
    if lowest < 0:
        raise ValueError(
            f"algorithm.adv_estimator='maxrl' needs rewards of 0 or more, but one is {lowest:g}; "
            "use 'grpo', or rewards in [0, 1] and use_kl_in_reward=false"
        )
    return on_all_tokens(difference_B / (groups.of_rows(groups.mean_G) + GRPO_EPS), inputs)


@register_advantage("lite_ppo")
def lite_ppo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """(reward - group mean) / (std of the batch's rewards + 1e-6) (Lite PPO, Liu et al. 2025, arXiv 2508.08221)."""
    difference_B, _ = above_group_mean(inputs)
    batch = group_statistics(inputs.reward_B(), torch.zeros_like(inputs.group_B))
    return on_all_tokens(difference_B / (batch.of_rows(batch.std_G) + GRPO_EPS), inputs)


@register_advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """reward - group mean, whitened over all sampled tokens (REINFORCE++ with baseline, arXiv 2501.03262)."""
    mask_BR = inputs.response_mask_BR
    raw_BR = above_group_mean(inputs)[0][:, None] * mask_BR
    advantages_BR = masked_whiten(raw_BR, mask_BR).float()
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR)


@register_advantage("gdpo")
def gdpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Several rewards: sum over algorithm.gdpo_reward_keys of weight * (its grpo advantage), then whitened.

    Rewards that are added up first lose which of them a response earned; here each is normalised in its group on its
    own (GDPO, Liu et al. 2026, arXiv 2601.05242). "score" is the response's reward after shaping and KL, other keys are
    what the reward function returned. Whitened over all sampled tokens, as in verl; norm_adv_by_std_in_grpo acts as in
    grpo.
    """
    keys = algorithm.gdpo_reward_keys
    total_B = torch.zeros(len(inputs.group_B), dtype=torch.float64)
    for key, weight in zip(keys, algorithm.gdpo_reward_weights or [1.0] * len(keys), strict=True):
        values_B = inputs.reward_B() if key == "score" else inputs.components[key]
        total_B += weight * normalised_by_group(values_B, inputs.group_B, algorithm.norm_adv_by_std_in_grpo)
    raw_BR = total_B[:, None] * inputs.response_mask_BR
    advantages_BR = masked_whiten(raw_BR, inputs.response_mask_BR).float()
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR)


# ---- from the returns of turns, for multi-turn responses


def turns_in(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Turns:
    """The batch's turns; ValueError naming the estimator when it has none."""
    if inputs.step_BR is None:
        raise ValueError(
            f"algorithm.adv_estimator={algorithm.adv_estimator!r} needs turns (step_BR), but these responses have one "
            "turn only; use 'grpo' or 'reinforce' without multi-turn rollout"
        )
    return turns_of(inputs.step_BR, inputs.response_mask_BR)


@register_advantage("step_reinforce")
def step_reinforce(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """The return of the token's turn, discounted by step_reward_gamma a turn (ROLL's step-wise reinforce)."""
    turns = turns_in(inputs, algorithm)
    returns_BK = turn_returns(turns, inputs.token_rewards_BR, algorithm.step_reward_gamma)
    returns_BR = turns.of_tokens(returns_BK).float()
    return AdvantageOutputs(advantages_BR=returns_BR, returns_BR=returns_BR)


@register_advantage("gigpo")
def gigpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Group in group (GiGPO, Feng et al. 2025, arXiv 2505.10978): the episode's advantage plus the turn's.

    Episode: reward of the whole response, as in grpo. Turn: its return (step_reward_gamma), compared with the turns of
    the same prompt that began in the same state. Weights: gigpo.episode_weight and gigpo.step_weight; without division
    by deviations if norm_adv_by_std_in_grpo is false.
    """
    turns, by_std = turns_in(inputs, algorithm), algorithm.norm_adv_by_std_in_grpo
    if inputs.anchor_BR is None:
        raise ValueError(
            "algorithm.adv_estimator='gigpo' needs the states before turns (anchor_BR), but there are none"
        )
    returns_BK = turn_returns(turns, inputs.token_rewards_BR, algorithm.step_reward_gamma)
    episode_B = normalised_by_group(inputs.reward_B(), inputs.group_B, by_std)
    step_BK = anchor_advantages(turns, returns_BK, inputs.anchor_BR, inputs.group_B, by_std)
    weights = algorithm.gigpo
    advantages_BR = turns.of_tokens(weights.episode_weight * episode_B[:, None] + weights.step_weight * step_BK).float()
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR)


# ---- from discounted returns, token by token


def discounted_returns(inputs: AdvantageInputs, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G of the next sampled token, over tool text: float32 [B, R], 0 outside the mask."""
    rewards, mask = inputs.token_rewards_BR, inputs.response_mask_BR
    following_B = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    backwards: list[Tensor] = []
    for t in reversed(range(rewards.shape[1])):
        following_B = torch.where(mask[:, t], rewards[:, t] + gamma * following_B, following_B)
        backwards.append(following_B)
    returns_BR = torch.stack(backwards[::-1], dim=1) if backwards else rewards
    return masked_fill_zero(returns_BR, mask).float()


@register_advantage("reinforce")
def reinforce(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """The discounted return itself, without a baseline (Williams 1992)."""
    returns_BR = discounted_returns(inputs, algorithm.gamma)
    return AdvantageOutputs(advantages_BR=returns_BR, returns_BR=returns_BR)


@register_advantage("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """The discounted return, whitened over all sampled tokens (REINFORCE++, Hu et al. 2025, arXiv 2501.03262)."""
    returns_BR = discounted_returns(inputs, algorithm.gamma)
    advantages_BR = masked_whiten(returns_BR, inputs.response_mask_BR)
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=returns_BR)


# ---- against a baseline from outside the batch, or one for each position


@register_advantage("remax")
def remax(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Undiscounted return - reward of the greedy response to the same prompt (ReMax, Li et al. 2023, arXiv 2310.10505).

    The baseline does not depend on the sampled response, so the gradient stays unbiased, also with one response each.
    """
    mask_BR = inputs.response_mask_BR
    if inputs.baseline_B is None:
        raise ValueError("algorithm.adv_estimator='remax' needs the scores of greedy responses, but there are none")
    returns_BR = discounted_returns(inputs, gamma=1.0)
    advantages_BR = masked_fill_zero(returns_BR - inputs.baseline_B[:, None], mask_BR)
    metrics = {"critic/baseline/mean": inputs.baseline_B.mean().item()} if len(inputs.baseline_B) else {}
    return AdvantageOutputs(advantages_BR=advantages_BR.float(), returns_BR=returns_BR, metrics=metrics)


@register_advantage("optimal_token_baseline")
def optimal_token_baseline(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Return - the group's variance-minimal baseline at each position (Li et al. 2026, arXiv 2602.07078).

    b_t = sum_i G_it W_it / sum_i W_it,  W_it = sum_{j <= t} w_ij,  w = 1 - 2 p(y) + sum_v p(v)^2: the squared norm of
    the token's score with respect to the logits, times its squared importance weight where there is one. Where only
    one row of the group has a sampled token b_t is 0 (as in verl); a group of one has advantage 0, as everywhere here.
    """
    returns_BR = discounted_returns(inputs, gamma=1.0)
    return _above_optimal_baseline(returns_BR, _path_energy(inputs), inputs.response_mask_BR, inputs)


@register_advantage("tir_optimal_token_baseline")
def tir_optimal_token_baseline(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """The same with positions counted in sampled tokens, tool text left out: for tool-integrated reasoning."""
    mask_BR = inputs.response_mask_BR
    rows, columns = mask_BR.nonzero(as_tuple=True)
    place = (mask_BR.cumsum(dim=1) - 1)[rows, columns]

    def compact(values_BR: Tensor) -> Tensor:
        packed = torch.zeros_like(values_BR)
        packed[rows, place] = values_BR[rows, columns]
        return packed

    returns_BR = discounted_returns(inputs, gamma=1.0)
    packed = _above_optimal_baseline(compact(returns_BR), compact(_path_energy(inputs)), compact(mask_BR), inputs)
    advantages_BR = torch.zeros_like(returns_BR)
    advantages_BR[rows, columns] = packed.advantages_BR[rows, place]
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=returns_BR)


def _path_energy(inputs: AdvantageInputs) -> Tensor:
    """W of each token (float64 [B, R]): the row's summed squared score norms up to and with it."""
    if inputs.old_log_probs_BR is None or inputs.sum_pi_squared_BR is None:
        raise ValueError(
            "algorithm.adv_estimator=(tir_)optimal_token_baseline needs old log-probs and sums of squared "
            "probabilities: set actor_rollout_ref.actor.old_log_probs=recompute"
        )
    norm_BR = 1 - 2 * inputs.old_log_probs_BR.double().exp() + inputs.sum_pi_squared_BR.double()
    if inputs.importance_weights_BR is not None:
        norm_BR = norm_BR * inputs.importance_weights_BR.double() ** 2
    return masked_fill_zero(norm_BR.clamp(min=0), inputs.response_mask_BR).cumsum(dim=1)


def _above_optimal_baseline(
    returns_BR: Tensor, energy_BR: Tensor, mask_BR: Tensor, inputs: AdvantageInputs
) -> AdvantageOutputs:
    """Returns minus the weighted mean return of the group's rows that have a token at the position."""
    ids, row_group_B = torch.unique(inputs.group_B, return_inverse=True)

    def over_group(values_BR: Tensor) -> Tensor:
        masked_BR = masked_fill_zero(values_BR.double(), mask_BR)
        sums_GR = masked_BR.new_zeros(len(ids), mask_BR.shape[1]).index_add(0, row_group_B, masked_BR)
        return sums_GR[row_group_B]

    count_BR, weight_BR = over_group(torch.ones_like(returns_BR)), over_group(energy_BR)
    plain_BR = over_group(returns_BR) / count_BR.clamp(min=1)  # where no row's score has any energy
    weighted_BR = over_group(returns_BR * energy_BR) / torch.where(weight_BR > 0, weight_BR, torch.ones_like(weight_BR))
    baseline_BR = torch.where(weight_BR > 0, weighted_BR, plain_BR)
    alone_B1 = (torch.bincount(row_group_B, minlength=len(ids))[row_group_B] == 1)[:, None]
    advantages_BR = returns_BR - masked_fill_zero(baseline_BR, count_BR > 1)
    advantages_BR = masked_fill_zero(advantages_BR, mask_BR & ~alone_B1).float()
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=returns_BR)
