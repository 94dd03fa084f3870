"""Advantage estimators: from token rewards to credit. One function each, chosen by algorithm.adv_estimator.

Each has a row in config/menus.txt. To add one: CONTRIBUTING.md has the steps; for a run of one's own
algorithm.adv_estimator=file.py:name does. Statistics are those of the whole rollout batch: estimators run on the
driver, before anything is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from verl_like.algorithms.groups import GroupStatistics, group_statistics
from verl_like.algorithms.masked import masked_fill_zero, masked_whiten, whitened_rows
from verl_like.algorithms.registry import Registry
from verl_like.algorithms.stepwise import Turns, anchor_advantages, normalised_by_group, turn_returns, turns_of
from verl_like.batch import TensorStruct, beside, tokens
from verl_like.config import AlgorithmConfig
from verl_like.config.menus import ESTIMATORS
from verl_like.flat_columns import Blocks, on_rows, row_sums
from verl_like.registry import part

GRPO_EPS = 1e-6
_LOOP_BLOCK = 2**22  # entries of a block of rows: fewer rows would make more steps of a loop over tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs(TensorStruct):
    """Columns that an advantage estimator may read, [T] or padded (`values_BR`): see verl_like/batch.py.

    Optional columns are there when the run has them. Padding is 0 or false. A row is a whole episode: one whose history
    was rewritten comes joined to one row (see algorithms/experience.py).
    """

    without_lengths: ClassVar[bool] = True

    token_rewards_T: Tensor = tokens()  # float32: reward after KL, on the token that earned it, 0 elsewhere
    response_mask_T: Tensor = tokens()  # bool: tokens the policy sampled
    response_length_B: Tensor  # int64
    group_B: Tensor  # int64: rows with the same number answer the same prompt
    values_T: Tensor | None = tokens(default=None)  # V(state before token t), from the critic
    old_log_probs_T: Tensor | None = tokens(default=None)
    components: dict[str, Tensor] = beside(default_factory=dict)  # float64 [B]: rewards by name, for gdpo
    # turn of each sampled token, and state before the turn: see algorithms/stepwise.py
    step_T: Tensor | None = tokens(fill=-1, default=None)
    anchor_T: Tensor | None = tokens(fill=-1, default=None)
    # over the vocabulary, of squared probabilities, under the old policy
    sum_pi_squared_T: Tensor | None = tokens(default=None)
    # of algorithm.rollout_correction, where the driver has them
    importance_weights_T: Tensor | None = tokens(default=None)
    baseline_B: Tensor | None = None  # reward of the greedy response to the row's prompt

    def reward_B(self) -> Tensor:
        """Reward of the whole response, float32."""
        rewards_T = masked_fill_zero(self.token_rewards_T, self.response_mask_T)
        return row_sums(rewards_T, self.response_length_B).float()

    def sampled_B(self) -> Tensor:
        """Tokens that the policy sampled, int64 [B]."""
        return row_sums(self.response_mask_T, self.response_length_B)

    def on_sampled(self, values_B: Tensor) -> Tensor:
        """Spread one value per row over its sampled tokens, 0 on others: float32 [T]."""
        return masked_fill_zero(on_rows(values_B.float(), self.response_length_B), self.response_mask_T)

    def by_blocks(
        self, work: Callable[..., Tensor], *columns_T: Tensor, groups: bool = False, entries: int | None = None
    ) -> Tensor:
        """Apply `work` to padded blocks of the columns; return its answers as one column [T].

        Args:
            work: function of padded tensors [b, R]; returns one of that shape.
            columns_T: columns to cut into blocks of whole rows.
            groups: keep whole groups in a block, and give `work` the rows' group_B as first argument.
            entries: largest size of a padded block; None means the default.
        """
        blocks = Blocks(self.response_length_B, self.group_B if groups else None, entries)
        answer_T = torch.zeros(0)
        for rows in blocks:
            given = [blocks.padded(column, rows) for column in columns_T]
            answer_bR = work(self.group_B[rows], *given) if groups else work(*given)
            if not len(answer_T):
                answer_T = torch.zeros(self.response_mask_T.shape, dtype=answer_bR.dtype)
            blocks.put(answer_T, rows, answer_bR)
        return answer_T


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOutputs(TensorStruct):
    """Advantages and returns, 0 outside response_mask. Given padded, as [B, R], lengths need not be said."""

    without_lengths: ClassVar[bool] = True

    advantages_T: Tensor = tokens()
    returns_T: Tensor = tokens()
    response_length_B: Tensor
    metrics: dict[str, float] = beside(default_factory=dict)


AdvantageFunction = Callable[[AdvantageInputs, AlgorithmConfig], AdvantageOutputs]
ADVANTAGES: Registry[AdvantageFunction] = Registry(
    "algorithm.adv_estimator",
    ESTIMATORS,
    arguments=("inputs", "algorithm"),
    of_verls=lambda function: part("advantages", "of_verls")(function),
)
register_advantage = ADVANTAGES.register


def compute_advantages(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Run the estimator that algorithm.adv_estimator names."""
    outputs = ADVANTAGES.lookup(algorithm.adv_estimator)(inputs, algorithm)
    found, flat = [outputs.advantages_T, outputs.returns_T], inputs.response_mask_T.shape
    if all(column is not None for column in found):
        if torch.equal(outputs.response_length_B, inputs.response_length_B):
            if all(column.shape == flat for column in found):
                return outputs
        elif len(outputs.response_length_B) == len(inputs):  # padded: all rows as long as they are wide
            width, longest = int(outputs.response_length_B[0]), int(inputs.response_length_B.max())
            if width == longest and all(column.numel() == len(inputs) * width for column in found):
                advantages_T, returns_T = (inputs.flat(column.view(len(inputs), width)) for column in found)
                return outcome(inputs, advantages_T, returns_T, outputs.metrics)
    shapes = ["nothing" if column is None else tuple(column.shape) for column in found]
    raise ValueError(
        f"algorithm.adv_estimator={algorithm.adv_estimator!r} returned {shapes[0]} as advantages and {shapes[1]} as "
        f"returns (padded columns flat), but there are {len(inputs)} responses with {flat[0]} tokens, the longest "
        f"{int(inputs.response_length_B.max())}: return columns [T] with their lengths, or [B, longest] without"
    )


def outcome(
    inputs: AdvantageInputs, advantages_T: Tensor, returns_T: Tensor, metrics: dict[str, float] | None = None
) -> AdvantageOutputs:
    """Make an estimator's result from advantages and returns, as columns of the inputs' rows."""
    lengths = inputs.response_length_B
    return AdvantageOutputs(
        advantages_T=advantages_T, returns_T=returns_T, response_length_B=lengths, metrics=metrics or {}
    )


def gae(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Generalized advantage estimation, whitened over all tokens (Schulman et al. 2016, arXiv 1506.02438).

    A token outside the mask (tool text) is stepped over: the value and the running sum of the next sampled token are
    carried on undiscounted, so a multi-turn row equals the same row with its tool text cut out. The same holds where an
    episode goes on in another row: the state after a row's last token is the next row's prompt.
    """
    if inputs.values_T is None:
        raise ValueError(
            "algorithm.adv_estimator='gae' needs values, but this run has no critic; use 'grpo' or add one"
        )

    def backwards(rewards_bR: Tensor, values_bR: Tensor, mask_bR: Tensor) -> Tensor:
        """Advantages before whitening. Time first: what one step reads lies together."""
        rewards_Rb, values_Rb, mask_Rb = (column.T.contiguous() for column in (rewards_bR, values_bR, mask_bR))
        raw_Rb = torch.empty_like(rewards_Rb)
        next_value = next_advantage = rewards_Rb.new_zeros(rewards_Rb.shape[1])
        for t in reversed(range(len(rewards_Rb))):
            delta = rewards_Rb[t] + algorithm.gamma * next_value - values_Rb[t]
            advantage = delta + algorithm.gamma * algorithm.lam * next_advantage
            next_value = torch.where(mask_Rb[t], values_Rb[t], next_value)
            next_advantage = torch.where(mask_Rb[t], advantage, next_advantage)
            raw_Rb[t] = next_advantage
        return raw_Rb.T

    mask_T = inputs.response_mask_T
    raw_T = inputs.by_blocks(backwards, inputs.token_rewards_T, inputs.values_T, mask_T, entries=_LOOP_BLOCK)
    return outcome(inputs, masked_whiten(raw_T, mask_T), masked_fill_zero(raw_T + inputs.values_T, mask_T))


def grpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Group-relative advantage: (reward - group mean) / (group std + 1e-6) on every token (DeepSeekMath, arXiv
    2402.03300).

    norm_adv_by_std_in_grpo=False leaves the division out (Dr. GRPO, arXiv 2503.20783). A group of one has nothing to be
    compared with: its advantage is 0 (verl gives it its reward).
    """
    by_std = algorithm.norm_adv_by_std_in_grpo
    return on_all_tokens(normalised_by_group(inputs.reward_B(), inputs.group_B, by_std), inputs)


# ---- one advantage per response, from the rewards of its group. A group of one has nothing to be compared with: 0.


def on_all_tokens(advantage_B: Tensor, inputs: AdvantageInputs) -> AdvantageOutputs:
    """The row's advantage on each of its sampled tokens, as returns too."""
    advantages_T = inputs.on_sampled(advantage_B)
    return outcome(inputs, advantages_T, advantages_T)


def whitened(advantage_B: Tensor, inputs: AdvantageInputs) -> AdvantageOutputs:
    """The row's advantage, less the mean over all sampled tokens, by their deviation, on each of them."""
    advantages_T = inputs.on_sampled(whitened_rows(advantage_B, inputs.sampled_B()))
    return outcome(inputs, advantages_T, advantages_T)


def above_group_mean(inputs: AdvantageInputs) -> tuple[Tensor, GroupStatistics]:
    """reward - group mean (float64 [B]), and the statistics of the groups' rewards."""
    reward_B = inputs.reward_B()
    groups = group_statistics(reward_B, inputs.group_B)
    return reward_B.double() - groups.of_rows(groups.mean_G), groups


def dr_grpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """reward - group mean: grpo without the division, whatever norm_adv_by_std_in_grpo says (arXiv 2503.20783)."""
    return on_all_tokens(above_group_mean(inputs)[0], inputs)


def rloo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """reward - mean reward of the others in the group (RLOO, Ahmadian et al. 2024, arXiv 2402.14740)."""
    difference_B, groups = above_group_mean(inputs)
    size_B = groups.of_rows(groups.size_G)
    return on_all_tokens(difference_B * size_B / (size_B - 1).clamp(min=1), inputs)


def opo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """reward - length-weighted mean reward of the group (OPO's optimal baseline, Hao et al. 2025, arXiv 2505.23585)."""
    reward_B, length_B = inputs.reward_B().double(), inputs.sampled_B().double()
    groups = group_statistics(reward_B, inputs.group_B)
    baseline_G = groups.sums_of(reward_B * length_B) / groups.sums_of(length_B).clamp(min=1)
    return on_all_tokens(reward_B - groups.of_rows(baseline_G), inputs)


def gpg(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """alpha * (reward - group mean), alpha = rows / rows of groups whose rewards differ (GPG, arXiv 2504.02546).

    alpha makes up for groups without a signal. (verl counts rows with a non-zero reward instead, which depends on where
    the zero of the reward is.)
    """
    difference_B, groups = above_group_mean(inputs)
    with_signal = (groups.of_rows(groups.std_G) > 0).sum().clamp(min=1)
    return on_all_tokens(difference_B * len(difference_B) / with_signal, inputs)


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


def lite_ppo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """(reward - group mean) / (std of the batch's rewards + 1e-6) (Lite PPO, Liu et al. 2025, arXiv 2508.08221)."""
    difference_B, _ = above_group_mean(inputs)
    batch = group_statistics(inputs.reward_B(), torch.zeros_like(inputs.group_B))
    return on_all_tokens(difference_B / (batch.of_rows(batch.std_G) + GRPO_EPS), inputs)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """reward - group mean, whitened over all sampled tokens (REINFORCE++ with baseline, arXiv 2501.03262)."""
    return whitened(above_group_mean(inputs)[0], inputs)


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
    return whitened(total_B, inputs)


# ---- from the returns of turns, for multi-turn responses


def turns_in(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> Turns:
    """Return the batch's turns. Raises ValueError, naming the estimator, when the batch has none."""
    if inputs.step_T is None:
        raise ValueError(
            f"algorithm.adv_estimator={algorithm.adv_estimator!r} needs turns (step_T), but these responses have one "
            "turn only; use 'grpo' or 'reinforce' without multi-turn rollout"
        )
    return turns_of(inputs.step_BR, inputs.response_mask_BR)


def step_reinforce(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """The return of the token's turn, discounted by step_reward_gamma a turn (ROLL's step-wise reinforce)."""
    turns = turns_in(inputs, algorithm)
    returns_BK = turn_returns(turns, inputs.token_rewards_BR, algorithm.step_reward_gamma)
    returns_T = inputs.flat(turns.of_tokens(returns_BK).float())
    return outcome(inputs, returns_T, returns_T)


def gigpo(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Group in group (GiGPO, Feng et al. 2025, arXiv 2505.10978): the episode's advantage plus the turn's.

    Episode: reward of the whole response, as in grpo. Turn: its return (step_reward_gamma), compared with the turns of
    the same prompt that began in the same state. Weights: gigpo.episode_weight and gigpo.step_weight; without division
    by deviations if norm_adv_by_std_in_grpo is false.
    """
    turns, by_std = turns_in(inputs, algorithm), algorithm.norm_adv_by_std_in_grpo
    if inputs.anchor_T is None:
        raise ValueError("algorithm.adv_estimator='gigpo' needs the states before turns (anchor_T), but there are none")
    returns_BK = turn_returns(turns, inputs.token_rewards_BR, algorithm.step_reward_gamma)
    episode_B = normalised_by_group(inputs.reward_B(), inputs.group_B, by_std)
    step_BK = anchor_advantages(turns, returns_BK, inputs.anchor_BR, inputs.group_B, by_std)
    weights = algorithm.gigpo
    summed_BK = weights.episode_weight * episode_B[:, None] + weights.step_weight * step_BK
    advantages_T = inputs.flat(turns.of_tokens(summed_BK).float())
    return outcome(inputs, advantages_T, advantages_T)


# ---- from discounted returns, token by token


def discounted_returns(inputs: AdvantageInputs, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G of the next sampled token, over tool text: float32 [T], 0 outside the mask."""

    def backwards(rewards_bR: Tensor, mask_bR: Tensor) -> Tensor:
        rewards_Rb, mask_Rb = rewards_bR.T.contiguous(), mask_bR.T.contiguous()
        following_b = torch.zeros(len(rewards_bR), dtype=torch.float64)
        returns_Rb = torch.zeros(rewards_Rb.shape)
        for t in reversed(range(len(rewards_Rb))):
            following_b = torch.where(mask_Rb[t], rewards_Rb[t] + gamma * following_b, following_b)
            returns_Rb[t] = following_b
        return masked_fill_zero(returns_Rb, mask_Rb).T

    return inputs.by_blocks(backwards, inputs.token_rewards_T, inputs.response_mask_T, entries=_LOOP_BLOCK)


def reinforce(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """The discounted return itself, without a baseline (Williams 1992)."""
    returns_T = discounted_returns(inputs, algorithm.gamma)
    return outcome(inputs, returns_T, returns_T)


def reinforce_plus_plus(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """The discounted return, whitened over all sampled tokens (REINFORCE++, Hu et al. 2025, arXiv 2501.03262)."""
    returns_T = discounted_returns(inputs, algorithm.gamma)
    return outcome(inputs, masked_whiten(returns_T, inputs.response_mask_T), returns_T)


# ---- against a baseline from outside the batch, or one for each position


def remax(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Undiscounted return - reward of the greedy response to the same prompt (ReMax, Li et al. 2023, arXiv 2310.10505).

    The baseline does not depend on the sampled response, so the gradient stays unbiased, also with one response each.
    """
    if inputs.baseline_B is None:
        raise ValueError("algorithm.adv_estimator='remax' needs the scores of greedy responses, but there are none")
    returns_T = discounted_returns(inputs, gamma=1.0)
    metrics = {"critic/baseline/mean": inputs.baseline_B.mean().item()} if len(inputs.baseline_B) else {}
    return outcome(inputs, returns_T - inputs.on_sampled(inputs.baseline_B), returns_T, metrics)


def optimal_token_baseline(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Return - the group's variance-minimal baseline at each position (Li et al. 2026, arXiv 2602.07078).

    b_t = sum_i G_it W_it / sum_i W_it,  W_it = sum_{j <= t} w_ij,  w = 1 - 2 p(y) + sum_v p(v)^2: the squared norm of
    the token's score with respect to the logits, times its squared importance weight where there is one. Where only
    one row of the group has a sampled token b_t is 0 (as in verl); a group of one has advantage 0, as everywhere here.
    """
    returns_T, columns = discounted_returns(inputs, gamma=1.0), _energy_columns(inputs)

    def work(group_b: Tensor, returns_bR: Tensor, mask_bR: Tensor, *energy: Tensor) -> Tensor:
        return _above_optimal_baseline(returns_bR, _path_energy(mask_bR, *energy), mask_bR, group_b)

    advantages_T = inputs.by_blocks(work, returns_T, inputs.response_mask_T, *columns, groups=True)
    return outcome(inputs, advantages_T, returns_T)


def tir_optimal_token_baseline(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> AdvantageOutputs:
    """Optimal token baseline for tool-integrated reasoning: positions count sampled tokens, not tool text."""
    returns_T, columns = discounted_returns(inputs, gamma=1.0), _energy_columns(inputs)

    def work(group_b: Tensor, returns_bR: Tensor, mask_bR: Tensor, *energy: Tensor) -> Tensor:
        rows, places = mask_bR.nonzero(as_tuple=True)
        compact = (mask_bR.cumsum(dim=1) - 1)[rows, places]

        def packed(values_bR: Tensor) -> Tensor:
            found = torch.zeros_like(values_bR)
            found[rows, compact] = values_bR[rows, places]
            return found

        energy_bR = packed(_path_energy(mask_bR, *energy))
        found_bR = _above_optimal_baseline(packed(returns_bR), energy_bR, packed(mask_bR), group_b)
        advantages_bR = torch.zeros_like(returns_bR)
        advantages_bR[rows, places] = found_bR[rows, compact]
        return advantages_bR

    advantages_T = inputs.by_blocks(work, returns_T, inputs.response_mask_T, *columns, groups=True)
    return outcome(inputs, advantages_T, returns_T)


def _energy_columns(inputs: AdvantageInputs) -> list[Tensor]:
    if inputs.old_log_probs_T is None or inputs.sum_pi_squared_T is None:
        raise ValueError(
            "algorithm.adv_estimator=(tir_)optimal_token_baseline needs old log-probs and sums of squared "
            "probabilities: set actor_rollout_ref.actor.old_log_probs=recompute"
        )
    weights = [] if inputs.importance_weights_T is None else [inputs.importance_weights_T]
    return [inputs.old_log_probs_T, inputs.sum_pi_squared_T, *weights]


def _path_energy(
    mask_bR: Tensor, old_log_probs_bR: Tensor, sum_pi_squared_bR: Tensor, weights_bR: Tensor | None = None
) -> Tensor:
    """W of each token (float64 [b, R]): the row's summed squared score norms up to and with it."""
    norm_bR = 1 - 2 * old_log_probs_bR.double().exp() + sum_pi_squared_bR.double()
    if weights_bR is not None:
        norm_bR = norm_bR * weights_bR.double() ** 2
    return masked_fill_zero(norm_bR.clamp(min=0), mask_bR).cumsum(dim=1)


def _above_optimal_baseline(returns_bR: Tensor, energy_bR: Tensor, mask_bR: Tensor, group_b: Tensor) -> Tensor:
    """Returns minus the weighted mean return of the group's rows that have a token at the position."""
    ids, row_group_b = torch.unique(group_b, return_inverse=True)

    def over_group(values_bR: Tensor) -> Tensor:
        masked_bR = masked_fill_zero(values_bR.double(), mask_bR)
        sums_GR = masked_bR.new_zeros(len(ids), mask_bR.shape[1]).index_add(0, row_group_b, masked_bR)
        return sums_GR[row_group_b]

    count_bR, weight_bR = over_group(torch.ones_like(returns_bR)), over_group(energy_bR)
    plain_bR = over_group(returns_bR) / count_bR.clamp(min=1)  # where no row's score has any energy
    weighted_bR = over_group(returns_bR * energy_bR) / torch.where(weight_bR > 0, weight_bR, torch.ones_like(weight_bR))
    baseline_bR = torch.where(weight_bR > 0, weighted_bR, plain_bR)
    alone_b1 = (torch.bincount(row_group_b, minlength=len(ids))[row_group_b] == 1)[:, None]
    advantages_bR = returns_bR - masked_fill_zero(baseline_bR, count_bR > 1)
    return masked_fill_zero(advantages_bR, mask_bR & ~alone_b1).float()
