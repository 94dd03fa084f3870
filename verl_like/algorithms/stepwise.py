"""Credit per turn of a multi-turn response: discounted returns of turns, and groups of turns that began alike.

A turn is what the policy sampled between two observations. `step_BR` numbers the turns of each row 0, 1, 2 ... and is
-1 on other tokens; `anchor_BR` holds an integer id of the environment's state before the turn, the same on all of its
tokens. Rows are whole episodes here (`batch.Episodes.join`).
Letters: K turns of the longest row, N turns of the whole batch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_like.algorithms.groups import group_statistics
from verl_like.algorithms.masked import masked_fill_zero
from verl_like.batch import Episodes, Rollouts
from verl_like.flat_columns import bounds

EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The turns of a batch. Where present_BK is false the row has no such turn, or sampled nothing in it."""

    step_BR: Tensor  # int64: turn of each sampled token, 0 elsewhere (see mask_BR)
    mask_BR: Tensor  # bool: tokens the policy sampled
    present_BK: Tensor  # bool

    def of_tokens(self, values_BK: Tensor) -> Tensor:
        """Spread the value of each turn over its sampled tokens, 0 elsewhere: [B, R]."""
        return masked_fill_zero(values_BK.gather(1, self.step_BR), self.mask_BR)

    def sums(self, values_BR: Tensor) -> Tensor:
        """Sum of a token column over each turn: float64 [B, K]."""
        zeros_BK = torch.zeros(self.present_BK.shape, dtype=torch.float64, device=values_BR.device)
        return zeros_BK.scatter_add(1, self.step_BR, masked_fill_zero(values_BR, self.mask_BR).double())

    def first(self, values_BR: Tensor) -> Tensor:
        """Value per turn of an int64 token column that is constant within turns: [B, K], -1 without the turn."""
        none_BK = torch.full(self.present_BK.shape, -1, dtype=torch.int64, device=values_BR.device)
        values_BR = torch.where(self.mask_BR, values_BR.long(), torch.full_like(values_BR, -1).long())
        return none_BK.scatter_reduce(1, self.step_BR, values_BR, reduce="amax")


def turns_of(step_BR: Tensor, mask_BR: Tensor) -> Turns:
    """Collect the turns that `step_BR` numbers. Raises ValueError if a sampled token is in none."""
    if (mask_BR & (step_BR < 0)).any():
        rows = (mask_BR & (step_BR < 0)).any(dim=1).nonzero().flatten().tolist()
        raise ValueError(f"rows {rows[:8]} have sampled tokens without a turn (step_BR is -1 there)")
    step_BR = torch.where(mask_BR, step_BR, 0).long()
    num_turns = int(step_BR.max()) + 1 if step_BR.numel() else 1
    present_BK = torch.zeros(len(step_BR), num_turns, dtype=torch.int64, device=step_BR.device)
    present_BK = present_BK.scatter_add(1, step_BR, mask_BR.long()) > 0
    return Turns(step_BR=step_BR, mask_BR=mask_BR, present_BK=present_BK)


def check_numbering(estimator: str, rollouts: Rollouts) -> None:
    """Check that turns are numbered on from row to row of each episode; raises ValueError otherwise.

    A turn is sampled in one context. A number that comes back in a later row is another turn; taken for the same one
    both would get a wrong return.
    """
    if rollouts.step_T is None or rollouts.episode_B is None:
        return
    ends = bounds(rollouts.response_length_B)
    for rows in Episodes.of(rollouts).rows():
        places = [slice(ends[row], ends[row + 1]) for row in rows.tolist()]
        steps = [rollouts.step_T[place][rollouts.response_mask_T[place]] for place in places]
        for before, after in itertools.pairwise(found for found in steps if len(found)):
            if int(after.min()) <= int(before.max()):
                raise ValueError(
                    f"algorithm.adv_estimator={estimator!r} needs turns that are numbered through all rows of an "
                    f"episode, but in episode {int(rollouts.episode_B[rows[0]])} a row with turn {int(after.min())} "
                    f"follows one with turn {int(before.max())}: let step_BR of each row go on where the row before "
                    "ended, or use 'grpo'"
                )


def turn_returns(turns: Turns, token_rewards_BR: Tensor, gamma: float) -> Tensor:
    """G_k = reward of turn k + gamma * G of the row's next turn: float64 [B, K], 0 without the turn.

    The discount counts turns, not tokens; a turn in which nothing was sampled is stepped over.
    """
    rewards_BK = turns.sums(token_rewards_BR)
    following_B = torch.zeros(len(rewards_BK), dtype=torch.float64, device=rewards_BK.device)
    columns: list[Tensor] = []
    for k in reversed(range(rewards_BK.shape[1])):
        here_B = rewards_BK[:, k] + gamma * following_B
        following_B = torch.where(turns.present_BK[:, k], here_B, following_B)
        columns.append(following_B)
    return masked_fill_zero(torch.stack(columns[::-1], dim=1), turns.present_BK)


def normalised_by_group(values_B: Tensor, group_B: Tensor, by_std: bool) -> Tensor:
    """(x - group mean) / (group std + 1e-6), or x - group mean: float64 [B]; 0 in a group of one."""
    groups = group_statistics(values_B, group_B)
    centred_B = values_B.double() - groups.of_rows(groups.mean_G)
    return centred_B / (groups.of_rows(groups.std_G) + EPS) if by_std else centred_B


def anchor_advantages(turns: Turns, returns_BK: Tensor, anchor_BR: Tensor, group_B: Tensor, by_std: bool) -> Tensor:
    """Step advantages of GiGPO: returns of turns compared with those that began in the same state: float64 [B, K].

    Turns are compared within their prompt's group and anchor state; the only turn that began in a state has 0.
    """
    anchors_BK = turns.first(anchor_BR)
    present = turns.present_BK
    keys_N2 = torch.stack([group_B[:, None].expand_as(anchors_BK)[present], anchors_BK[present]], dim=1)
    _, state_N = torch.unique(keys_N2, dim=0, return_inverse=True)
    advantages_BK = torch.zeros_like(returns_BK)
    advantages_BK[present] = normalised_by_group(returns_BK[present], state_N, by_std)
    return advantages_BK
