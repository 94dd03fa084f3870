from __future__ import annotations

import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.algorithms.builders import random_mask
from verl_like.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    AdvantageOutputs,
    compute_advantages,
    gae,
    grpo,
)
from verl_like.algorithms.groups import signal_metrics
from verl_like.algorithms.masked import masked_whiten
from verl_like.config import AlgorithmConfig


def outcome_inputs(rewards: list[float], groups: list[int], mask: Tensor | None = None) -> AdvantageInputs:
    """Each row's reward on its first token."""
    mask = torch.ones(len(rewards), 3, dtype=torch.bool) if mask is None else mask
    token_rewards = torch.zeros(mask.shape)
    token_rewards[:, 0] = torch.tensor(rewards)
    return AdvantageInputs(token_rewards_BR=token_rewards, response_mask_BR=mask, group_B=torch.tensor(groups))


def gae_inputs(seed: int, rows: int = 5, width: int = 7) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator).tolist()
    mask = random_mask(generator, lengths, width)
    return AdvantageInputs(
        token_rewards_BR=torch.randn(rows, width, generator=generator, dtype=torch.float64) * mask,
        response_mask_BR=mask,
        group_B=torch.arange(rows),
        values_BR=torch.randn(rows, width, generator=generator, dtype=torch.float64),
    )


def naive_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum_k (gamma lam)^k delta_{t+k}, written as the double sum of the paper."""
    steps = len(rewards)
    following = [*values[1:], 0.0]
    delta = [rewards[t] + gamma * following[t] - values[t] for t in range(steps)]
    return [sum((gamma * lam) ** k * delta[t + k] for k in range(steps - t)) for t in range(steps)]


# ---- grpo


def test_grpo_hand_values() -> None:
    inputs = outcome_inputs([1.0, 0.0, 0.0, 2.0, 4.0], [7, 7, 7, 3, 3])
    out = grpo(inputs, AlgorithmConfig(adv_estimator="grpo"))
    std_7, std_3 = math.sqrt(1 / 3), math.sqrt(2)
    expected = [2 / 3 / std_7, -1 / 3 / std_7, -1 / 3 / std_7, -1 / std_3, 1 / std_3]
    assert out.advantages_BR[:, 0].tolist() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(out.returns_BR, out.advantages_BR)


def test_grpo_without_std_is_dr_grpo() -> None:
    inputs = outcome_inputs([1.0, 0.0, 0.0, 2.0, 4.0], [7, 7, 7, 3, 3])
    out = grpo(inputs, AlgorithmConfig(norm_adv_by_std_in_grpo=False))
    assert out.advantages_BR[:, 0].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, -1.0, 1.0])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(-5, 5, width=32), st.integers(0, 3)), min_size=1, max_size=12),
    by_std=st.booleans(),
)
def test_grpo_equals_a_naive_loop(rows: list[tuple[float, int]], by_std: bool) -> None:
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    out = grpo(outcome_inputs(rewards, groups), AlgorithmConfig(norm_adv_by_std_in_grpo=by_std))
    for i, (reward, group) in enumerate(rows):
        mates = [r for r, g in rows if g == group]
        expected = reward - statistics.fmean(mates)
        if by_std:
            expected /= (statistics.stdev(mates) if len(mates) > 1 else 0.0) + 1e-6
        assert out.advantages_BR[i, 0].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_group_of_one_has_advantage_zero() -> None:
    out = grpo(outcome_inputs([5.0, 1.0, 0.0], [0, 1, 1]), AlgorithmConfig())
    assert out.advantages_BR[0].tolist() == [0.0, 0.0, 0.0]
    assert out.advantages_BR[1, 0] > 0


@pytest.mark.parametrize("reward", [0.1, 0.7, 1e6, -3.3])
def test_equal_rewards_have_advantage_exactly_zero(reward: float) -> None:
    out = grpo(outcome_inputs([reward] * 7, [0] * 7), AlgorithmConfig())
    assert (out.advantages_BR == 0).all()


def test_grpo_order_and_labels_of_groups_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(12, generator=generator).tolist()
    groups = [0, 1, 2, 3] * 3
    algorithm = AlgorithmConfig()
    plain = grpo(outcome_inputs(rewards, groups), algorithm).advantages_BR
    relabelled = grpo(outcome_inputs(rewards, [1000 - 7 * g for g in groups]), algorithm).advantages_BR
    assert torch.equal(plain, relabelled)
    order = torch.randperm(12, generator=generator).tolist()
    moved = grpo(outcome_inputs([rewards[i] for i in order], [groups[i] for i in order]), algorithm).advantages_BR
    assert torch.allclose(moved, plain[order], atol=1e-7)


def test_grpo_writes_on_sampled_tokens_only() -> None:
    mask = torch.tensor([[True, False, True, False], [True, True, False, False], [False] * 4])
    out = grpo(outcome_inputs([1.0, 0.0, 0.0], [0, 0, 0], mask), AlgorithmConfig())
    assert (out.advantages_BR[~mask] == 0).all()
    assert out.advantages_BR[0, 0] == out.advantages_BR[0, 2] != 0
    assert out.advantages_BR.isfinite().all()


# ---- gae


def test_gae_hand_values() -> None:
    inputs = AdvantageInputs(
        token_rewards_BR=torch.tensor([[0.0, 1.0]]),
        response_mask_BR=torch.ones(1, 2, dtype=torch.bool),
        group_B=torch.zeros(1, dtype=torch.int64),
        values_BR=torch.tensor([[0.5, 0.25]]),
    )
    out = gae(inputs, AlgorithmConfig(gamma=0.5, lam=0.5))
    # delta_1 = 1 - 0.25 = 0.75; delta_0 = 0.5 * 0.25 - 0.5 = -0.375; A_0 = -0.375 + 0.25 * 0.75 = -0.1875
    assert out.returns_BR[0].tolist() == pytest.approx([-0.1875 + 0.5, 0.75 + 0.25])
    raw = torch.tensor([[-0.1875, 0.75]])
    assert torch.allclose(out.advantages_BR, masked_whiten(raw, inputs.response_mask_BR))
    assert out.advantages_BR[0].tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], rel=1e-5)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 1.0)])
def test_gae_equals_the_paper_on_compacted_rows(seed: int, gamma: float, lam: float) -> None:
    """Tool text inside a row changes nothing: cut it out, apply the definition, and put the numbers back."""
    inputs = gae_inputs(seed)
    assert inputs.values_BR is not None
    raw = torch.zeros_like(inputs.token_rewards_BR)
    for i, mask in enumerate(inputs.response_mask_BR):
        rewards, values = inputs.token_rewards_BR[i][mask].tolist(), inputs.values_BR[i][mask].tolist()
        raw[i, mask] = torch.tensor(naive_gae(rewards, values, gamma, lam), dtype=torch.float64)
    tokens = raw[inputs.response_mask_BR].tolist()
    mean, var = statistics.fmean(tokens), statistics.variance(tokens)
    whitened = (raw - mean) / math.sqrt(var + 1e-8) * inputs.response_mask_BR
    out = gae(inputs, AlgorithmConfig(gamma=gamma, lam=lam))
    assert torch.allclose(out.advantages_BR, whitened)
    assert torch.allclose(out.returns_BR, (raw + inputs.values_BR) * inputs.response_mask_BR)


def test_gae_ignores_what_is_outside_the_mask() -> None:
    inputs = gae_inputs(3)
    assert inputs.values_BR is not None
    poisoned = AdvantageInputs(
        token_rewards_BR=inputs.token_rewards_BR,
        response_mask_BR=inputs.response_mask_BR,
        group_B=inputs.group_B,
        values_BR=torch.where(inputs.response_mask_BR, inputs.values_BR, float("nan")),
    )
    algorithm = AlgorithmConfig(gamma=0.9, lam=0.7)
    assert torch.equal(gae(poisoned, algorithm).advantages_BR, gae(inputs, algorithm).advantages_BR)


def test_gae_all_masked_row_and_empty_batch() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    inputs = AdvantageInputs(
        token_rewards_BR=torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        response_mask_BR=mask,
        group_B=torch.arange(2),
        values_BR=torch.ones(2, 2),
    )
    out = gae(inputs, AlgorithmConfig())
    assert out.advantages_BR[1].tolist() == [0.0, 0.0] and out.returns_BR[1].tolist() == [0.0, 0.0]
    empty = AdvantageInputs(
        token_rewards_BR=torch.zeros(0, 0),
        response_mask_BR=torch.zeros(0, 0, dtype=torch.bool),
        group_B=torch.zeros(0, dtype=torch.int64),
        values_BR=torch.zeros(0, 0),
    )
    assert gae(empty, AlgorithmConfig()).advantages_BR.shape == (0, 0)


def test_gae_needs_values() -> None:
    with pytest.raises(ValueError, match="needs values"):
        compute_advantages(outcome_inputs([1.0], [0]), AlgorithmConfig(adv_estimator="gae"))


def test_estimator_is_chosen_by_name() -> None:
    inputs = outcome_inputs([1.0, 0.0], [0, 0])
    chosen = compute_advantages(inputs, AlgorithmConfig(adv_estimator="grpo"))
    assert torch.equal(chosen.advantages_BR, grpo(inputs, AlgorithmConfig()).advantages_BR)
    with pytest.raises(ValueError, match="Did you mean 'grpo'"):
        compute_advantages(inputs, AlgorithmConfig(adv_estimator="gprpo"))


def test_signal_metrics_count_groups() -> None:
    metrics = signal_metrics(torch.tensor([1.0, 1.0, 0.0, 1.0, 9.0]), torch.tensor([4, 4, 2, 2, 8]))
    assert metrics["critic/group_zero_std_fraction"] == pytest.approx(1 / 2)
    assert metrics["critic/group_singleton_fraction"] == pytest.approx(1 / 3)
    alone = signal_metrics(torch.tensor([1.0]), torch.tensor([0]))
    assert alone == {"critic/group_zero_std_fraction": 0.0, "critic/group_singleton_fraction": 1.0}


@pytest.mark.parametrize("answer", ["short", "scalar", "wide", "nothing"])
def test_an_answer_of_another_shape_is_refused_by_name(answer: str) -> None:
    """Each would be cut or spread without a word."""
    inputs = gae_inputs(0)
    here, ones_BR = {"response_length_B": inputs.response_length_B}, torch.ones_like(inputs.token_rewards_BR)
    flat = torch.ones_like(inputs.token_rewards_T)
    given: dict[str, Any] = {
        "short": {"advantages_T": flat[:-1], "returns_T": flat[:-1], **here},
        "scalar": {"advantages_T": flat[:1], "returns_T": flat[:1], **here},
        "wide": {"advantages_BR": torch.cat([ones_BR, ones_BR], 1), "returns_BR": torch.cat([ones_BR, ones_BR], 1)},
        "nothing": {"advantages_BR": ones_BR, "returns_BR": None},
    }[answer]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ADVANTAGES._entries, "mine", lambda inputs, algorithm: AdvantageOutputs(**given))
        with pytest.raises(ValueError, match=r"adv_estimator='mine' returned .* return columns"):
            compute_advantages(inputs, SimpleNamespace(adv_estimator="mine"))  # type: ignore[arg-type]
    inputs.check()
    with pytest.raises(ValueError, match="padded columns differ: returns_BR"):
        AdvantageOutputs(advantages_BR=ones_BR, returns_BR=torch.cat([ones_BR, ones_BR], 1))  # type: ignore[call-arg]
