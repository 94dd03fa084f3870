"""Estimators that compare the responses of a group, and those of discounted returns."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.algorithms.builders import random_mask
from tests.unit.algorithms.test_advantages import outcome_inputs
from verl_like.algorithms.advantages import AdvantageInputs, compute_advantages
from verl_like.config import AlgorithmConfig

# One advantage for each response, from the rewards of its group
GROUP_ESTIMATORS = (
    "grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "maxrl", "lite_ppo", "reinforce_plus_plus_baseline",
)  # fmt: skip
REWARDS, GROUPS = [1.0, 0.0, 0.0, 2.0, 4.0], [7, 7, 7, 3, 3]


def advantages(name: str, inputs: AdvantageInputs, **keys: object) -> torch.Tensor:
    return compute_advantages(inputs, AlgorithmConfig(adv_estimator=name, **keys)).advantages_BR  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", [2 / 3, -1 / 3, -1 / 3, -1, 1]),
        ("rloo", [1, -1 / 2, -1 / 2, -2, 2]),
        ("opo", [2 / 3, -1 / 3, -1 / 3, -1, 1]),  # equal lengths: the plain mean
        ("gpg", [2 / 3, -1 / 3, -1 / 3, -1, 1]),  # every group has a signal
        ("grpo_passk", [1 / math.sqrt(1 / 3), 0, 0, 0, 2 / math.sqrt(2)]),
        ("maxrl", [2, -1, -1, -1 / 3, 1 / 3]),
        ("lite_ppo", [x / statistics.stdev(REWARDS) for x in (2 / 3, -1 / 3, -1 / 3, -1, 1)]),
    ],
)
def test_hand_values(name: str, expected: list[float]) -> None:
    found = advantages(name, outcome_inputs(REWARDS, GROUPS))
    assert found[:, 0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert torch.equal(found[:, 0], found[:, 2])


def test_opo_weighs_by_length() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    found = advantages("opo", outcome_inputs([1.0, 0.0], [0, 0], mask))
    assert found[:, 0].tolist() == pytest.approx([1 / 4, -3 / 4])  # baseline (3 * 1 + 1 * 0) / 4
    assert (found[~mask] == 0).all()


def test_gpg_makes_up_for_groups_without_signal() -> None:
    found = advantages("gpg", outcome_inputs([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2]))
    assert found[:, 0].tolist() == pytest.approx([1.5, -1.5, 0, 0, 0, 0])  # 6 rows, 2 with a signal


def test_passk_without_std_and_with_a_tie() -> None:
    inputs = outcome_inputs([3.0, 1.0, 0.5, 2.0, 2.0], [0, 0, 0, 1, 1])
    assert advantages("grpo_passk", inputs, norm_adv_by_std_in_grpo=False)[:, 0].tolist() == [2.0, 0, 0, 0, 0]


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match=r"maxrl' needs rewards of 0 or more, but one is -1"):
        advantages("maxrl", outcome_inputs([1.0, -1.0], [0, 0]))


def naive(name: str, i: int, rewards: list[float], groups: list[int], lengths: list[int], by_std: bool) -> float:
    """The definitions, row by row."""
    reward, mates = rewards[i], [k for k in range(len(rewards)) if groups[k] == groups[i]]
    group = [rewards[k] for k in mates]
    mean = statistics.fmean(group)
    if len(group) == 1:
        return 0.0
    if name == "rloo":
        return reward - statistics.fmean(rewards[k] for k in mates if k != i)
    if name == "opo":
        return reward - sum(lengths[k] * rewards[k] for k in mates) / sum(lengths[k] for k in mates)
    if name == "gpg":
        rewards_of = {g: {rewards[k] for k in range(len(rewards)) if groups[k] == g} for g in groups}
        informative = sum(len(rewards_of[g]) > 1 for g in groups)
        return (reward - mean) * len(rewards) / max(informative, 1)
    if name == "grpo_passk":
        ordered = sorted(group)
        gap = ordered[-1] - ordered[-2] if reward == ordered[-1] else 0.0
        return gap / (statistics.stdev(group) + 1e-6) if by_std else gap
    if name == "maxrl":
        return (reward - mean) / (mean + 1e-6)
    if name == "lite_ppo":
        return (reward - mean) / (statistics.stdev(rewards) + 1e-6)
    assert name == "dr_grpo"
    return reward - mean


LOOPS = ("rloo", "opo", "gpg", "grpo_passk", "maxrl", "lite_ppo", "dr_grpo")


@pytest.mark.parametrize("name", LOOPS)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=12),
    by_std=st.booleans(),
)
def test_group_estimators_equal_a_naive_loop(name: str, rows: list[tuple[int, int, int]], by_std: bool) -> None:
    rewards, groups, lengths = [r / 8 for r, _, _ in rows], [g for _, g, _ in rows], [n for _, _, n in rows]
    mask = torch.arange(6)[None, :] < torch.tensor(lengths)[:, None]
    inputs = outcome_inputs(rewards, groups, mask)
    found = advantages(name, inputs, norm_adv_by_std_in_grpo=by_std)
    for i in range(len(rows)):
        expected = naive(name, i, rewards, groups, lengths, by_std)
        assert found[i, 0].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert (found[~mask] == 0).all()


@pytest.mark.parametrize("name", [name for name in GROUP_ESTIMATORS if name != "reinforce_plus_plus_baseline"])
def test_a_group_of_one_and_equal_rewards_give_exactly_zero(name: str) -> None:
    found = advantages(name, outcome_inputs([5.0, 0.7, 0.7, 0.7], [0, 1, 1, 1]))
    assert (found == 0).all()


@pytest.mark.parametrize("reward", [0.1, 0.7, 1e6])
def test_opo_gives_equal_rewards_exactly_zero_at_any_lengths(reward: float) -> None:
    for seed in range(20):
        mask = torch.rand(7, 50, generator=torch.Generator().manual_seed(seed)) > 0.4
        mask[:, 0] = True
        assert (advantages("opo", outcome_inputs([reward] * 7, [0] * 7, mask)) == 0).all()


@pytest.mark.parametrize("name", [*GROUP_ESTIMATORS, "reinforce", "reinforce_plus_plus"])
def test_empty_rows_and_empty_batches(name: str) -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, False]])
    inputs = outcome_inputs([1.0, 0.0, 0.0], [0, 0, 0], mask)
    found = advantages(name, inputs)
    assert found.isfinite().all() and (found[~mask] == 0).all() and found.dtype == torch.float32
    nothing = outcome_inputs([0.0, 0.0], [0, 0], torch.zeros(2, 3, dtype=torch.bool))
    assert (advantages(name, nothing) == 0).all()
    empty = outcome_inputs([], [], torch.zeros(0, 3, dtype=torch.bool))
    empty = AdvantageInputs(
        token_rewards_BR=empty.token_rewards_BR,
        response_mask_BR=empty.response_mask_BR,
        group_B=torch.zeros(0, dtype=torch.int64),
    )
    assert len(advantages(name, empty)) == 0


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_order_and_labels_do_not_matter(name: str) -> None:
    rewards = torch.rand(12, generator=torch.Generator().manual_seed(0)).tolist()
    groups = [0, 1, 2, 3] * 3
    plain = advantages(name, outcome_inputs(rewards, groups))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    moved = advantages(name, outcome_inputs([rewards[i] for i in order], [900 - 7 * groups[i] for i in order]))
    assert torch.allclose(moved, plain[order], atol=1e-6)


# ---- discounted returns


def returns_by_hand(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def random_inputs(seed: int) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(seed)
    mask = random_mask(generator, [5, 3, 7, 1], 7)
    rewards = torch.randn(4, 7, generator=generator) * mask
    return AdvantageInputs(token_rewards_BR=rewards, response_mask_BR=mask, group_B=torch.tensor([0, 0, 1, 1]))


def whitened(values: list[list[float]]) -> list[list[float]]:
    tokens = [x for row in values for x in row]
    scale = math.sqrt(statistics.variance(tokens) + 1e-8)
    return [[(x - statistics.fmean(tokens)) / scale for x in row] for row in values]


def test_reinforce_hand_values() -> None:
    mask = torch.tensor([[True, False, True, True]])
    rewards = torch.tensor([[0.0, 0.0, 1.0, 2.0]])
    inputs = AdvantageInputs(token_rewards_BR=rewards, response_mask_BR=mask, group_B=torch.tensor([0]))
    found = advantages("reinforce", inputs, gamma=0.5)
    assert found.tolist() == [[1.0, 0.0, 2.0, 2.0]]  # 0.5 * 2, tool text stepped over, 1 + 0.5 * 2, 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_returns_equal_a_naive_loop(seed: int, gamma: float) -> None:
    inputs = random_inputs(seed)
    rewards = [row[mask].tolist() for row, mask in zip(inputs.token_rewards_BR, inputs.response_mask_BR, strict=True)]
    expected = [returns_by_hand(row, gamma) for row in rewards]
    check_rows(inputs, advantages("reinforce", inputs, gamma=gamma), expected)
    check_rows(inputs, advantages("reinforce_plus_plus", inputs, gamma=gamma), whitened(expected))
    out = compute_advantages(inputs, AlgorithmConfig(adv_estimator="reinforce_plus_plus", gamma=gamma))
    check_rows(inputs, out.returns_BR, expected)


@pytest.mark.parametrize("seed", range(4))
def test_reinforce_plus_plus_baseline_equals_a_naive_loop(seed: int) -> None:
    inputs = random_inputs(seed)
    reward = inputs.reward_B().tolist()
    means = [statistics.fmean(reward[:2])] * 2 + [statistics.fmean(reward[2:])] * 2
    lengths = inputs.response_mask_BR.sum(dim=1).tolist()
    expected = [[r - m] * n for r, m, n in zip(reward, means, lengths, strict=True)]
    check_rows(inputs, advantages("reinforce_plus_plus_baseline", inputs), whitened(expected))


def check_rows(inputs: AdvantageInputs, found: torch.Tensor, expected: list[list[float]]) -> None:
    for row, mask, wanted in zip(found, inputs.response_mask_BR, expected, strict=True):
        assert row[mask].tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert (row[~mask] == 0).all()
