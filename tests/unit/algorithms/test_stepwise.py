"""Estimators of several rewards (gdpo) and of turns (gigpo, step_reinforce) on synthetic batches."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.algorithms.builders import evaluated, rollouts, scores
from tests.unit.algorithms.test_advantages import outcome_inputs
from verl_like.algorithms.advantages import AdvantageInputs, compute_advantages
from verl_like.algorithms.experience import make_experience
from verl_like.algorithms.masked import masked_whiten
from verl_like.algorithms.stepwise import turn_returns, turns_of
from verl_like.batch import Rollouts
from verl_like.config import ActorConfig, AlgorithmConfig, GiGPOConfig

Row = list[tuple[int, float, int]]  # turns of a row: (sampled tokens, reward, state before)


def advantages(inputs: AdvantageInputs, **keys: Any) -> torch.Tensor:
    return compute_advantages(inputs, AlgorithmConfig(**keys)).advantages_BR


# ---- gdpo


def gdpo_inputs(score: list[float], groups: list[int], **components: list[float]) -> AdvantageInputs:
    columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in components.items()}
    return dataclasses.replace(outcome_inputs(score, groups), components=columns)


def naive_group_norm(values: list[float], groups: list[int], by_std: bool = True) -> list[float]:
    result = []
    for value, group in zip(values, groups, strict=True):
        mates = [v for v, g in zip(values, groups, strict=True) if g == group]
        std = statistics.stdev(mates) if len(mates) > 1 else 0.0
        result.append((value - statistics.fmean(mates)) / ((std + 1e-6) if by_std else 1.0))
    return result


def test_gdpo_tells_apart_what_grpo_cannot() -> None:
    """Rewards (right, short): (1,0) and (0,1) have the same sum; only gdpo with weights tells them apart."""
    right, short, groups = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0], [0] * 4
    inputs = gdpo_inputs([r + s for r, s in zip(right, short, strict=True)], groups, right=right, short=short)
    found = advantages(inputs, adv_estimator="gdpo", gdpo_reward_keys=["right", "short"])
    grpo = advantages(inputs, adv_estimator="grpo")
    assert grpo[0, 0] == grpo[1, 0] and found[0, 0] > found[1, 0] + 0.1


@pytest.mark.parametrize("weights", [[], [2.0, 0.5]])
@pytest.mark.parametrize("by_std", [True, False])
def test_gdpo_equals_a_naive_loop(weights: list[float], by_std: bool) -> None:
    score, acc, groups = [1.0, 0.0, 3.0, 2.0, 0.5], [1.0, 0.0, 0.0, 1.0, 1.0], [4, 4, 4, 1, 1]
    found = advantages(
        gdpo_inputs(score, groups, acc=acc),
        adv_estimator="gdpo",
        gdpo_reward_keys=["score", "acc"],
        gdpo_reward_weights=weights,
        norm_adv_by_std_in_grpo=by_std,
    )
    first, second = weights or [1.0, 1.0]
    raw = [
        first * a + second * b
        for a, b in zip(naive_group_norm(score, groups, by_std), naive_group_norm(acc, groups, by_std), strict=True)
    ]
    tokens = [x for x in raw for _ in range(3)]
    expected = [(x - statistics.fmean(tokens)) / statistics.stdev(tokens) for x in raw]
    assert found[:, 1].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_gdpo_edge_cases() -> None:
    keys: dict[str, Any] = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["score", "acc"]}
    equal = gdpo_inputs([0.3] * 4, [0, 0, 1, 1], acc=[1.0] * 4)
    assert (advantages(equal, **keys) == 0).all()
    alone = gdpo_inputs([0.3, 5.0], [0, 1], acc=[0.0, 1.0])  # two groups of one
    assert (advantages(alone, **keys) == 0).all()
    masked = dataclasses.replace(equal, response_mask_BR=torch.zeros(4, 3, dtype=torch.bool))
    assert (advantages(masked, **keys) == 0).all()


def test_gdpo_takes_its_rewards_from_the_reward_function() -> None:
    """ "score" is shaped and has the KL in it; other keys are raw. A key that is not returned is named."""
    algorithm = AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=["score", "acc"])
    batch = rollouts((1, 1, 1), [0, 0, 0])
    graded = scores([9.0, 9.0, 9.0]).replace(extras=[{"acc": a} for a in (True, False, 1)])
    shaped = torch.tensor([0.0, 1.0, 2.0])
    experience, _ = make_experience(algorithm, ActorConfig(), batch, graded, evaluated(batch), 0.0, reward_B=shaped)
    acc = naive_group_norm([1.0, 0.0, 1.0], [0] * 3)
    raw = [a + b for a, b in zip(naive_group_norm([0.0, 1.0, 2.0], [0] * 3), acc, strict=True)]
    expected = masked_whiten(torch.tensor(raw)[:, None], torch.ones(3, 1, dtype=torch.bool))
    assert torch.allclose(experience.advantages_BR, expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"gdpo_reward_keys=acc: .*returned a score alone"):
        make_experience(algorithm, ActorConfig(), batch, scores([1.0, 2.0, 3.0]), evaluated(batch), 0.0)


# ---- turns


def multi_turn(rows: list[Row], groups: list[int]) -> Rollouts:
    """Each turn is its sampled tokens, then one token of observation; its reward is on its last sampled token."""
    lengths = tuple(sum(tokens + 1 for tokens, _, _ in row) for row in rows)
    batch = rollouts(lengths, groups)
    mask = torch.zeros(batch.response_mask_BR.shape, dtype=torch.bool)
    step, anchor = torch.full(mask.shape, -1, dtype=torch.int32), torch.full(mask.shape, -1)
    reward = torch.zeros(mask.shape)
    for i, row in enumerate(rows):
        at = 0
        for k, (tokens, value, state) in enumerate(row):
            mask[i, at : at + tokens], step[i, at : at + tokens], anchor[i, at : at + tokens] = True, k, state
            if tokens:
                reward[i, at + tokens - 1] = value
            at += tokens + 1
    return batch.replace(response_mask_BR=mask, step_BR=step, anchor_BR=anchor, step_rewards_BR=reward)


def inputs_of(batch: Rollouts) -> AdvantageInputs:
    assert batch.step_rewards_BR is not None
    return AdvantageInputs(
        token_rewards_BR=batch.step_rewards_BR,
        response_mask_BR=batch.response_mask_BR,
        group_B=batch.group_B,
        step_BR=batch.step_BR,
        anchor_BR=batch.anchor_BR,
    )


ROWS: list[Row] = [
    [(2, 1.0, 0), (1, 0.0, 1), (3, 4.0, 2)],
    [(1, 0.0, 0), (2, 2.0, 2)],
    [(1, -1.0, 0), (1, 0.0, 3), (2, 1.0, 1)],
    [(3, 5.0, 0)],
]
GROUPS = [6, 6, 6, 2]


def naive_returns(row: Row, gamma: float) -> list[float]:
    """Returns of the turns in which something was sampled."""
    real = [value for tokens, value, _ in row if tokens]
    return [sum(gamma ** (j - k) * real[j] for j in range(k, len(real))) for k in range(len(real))]


def per_token(rows: list[Row], values: list[list[float]], width: int) -> list[list[float]]:
    """A value per sampled turn, written on its tokens; 0 on observations and padding."""
    result = []
    for row, of_turns in zip(rows, values, strict=True):
        given, tokens = iter(of_turns), []
        for count, _, _ in row:
            tokens += ([next(given)] * count if count else []) + [0.0]
        result.append(tokens + [0.0] * (width - len(tokens)))
    return result


def naive_gigpo(rows: list[Row], groups: list[int], gamma: float, weights: tuple[float, float]) -> list[list[float]]:
    """The definition, turn by turn."""
    episode = naive_group_norm([sum(value for tokens, value, _ in row if tokens) for row in rows], groups)
    returns = [naive_returns(row, gamma) for row in rows]
    states = [[state for tokens, _, state in row if tokens] for row in rows]
    result = []
    for i, row_returns in enumerate(returns):
        values = []
        for k, value in enumerate(row_returns):
            mates = [
                returns[j][m]
                for j in range(len(rows))
                for m in range(len(returns[j]))
                if groups[j] == groups[i] and states[j][m] == states[i][k]
            ]
            std = statistics.stdev(mates) if len(mates) > 1 else 0.0
            values.append(weights[0] * episode[i] + weights[1] * (value - statistics.fmean(mates)) / (std + 1e-6))
        result.append(values)
    return result


def test_step_reinforce_by_hand() -> None:
    batch = multi_turn(ROWS, GROUPS)
    found = advantages(inputs_of(batch), adv_estimator="step_reinforce", step_reward_gamma=0.5)
    expected = [[1 + 0 + 0.25 * 4, 0 + 0.5 * 4, 4.0], [0 + 0.5 * 2, 2.0], [-1 + 0.25, 0.5, 1.0], [5.0]]
    assert found.tolist() == per_token(ROWS, expected, found.shape[1])
    undiscounted = advantages(inputs_of(batch), adv_estimator="step_reinforce", step_reward_gamma=1.0)
    assert undiscounted[:, 0].tolist() == [5.0, 2.0, 0.0, 5.0]


def test_gigpo_by_hand() -> None:
    """Two episodes from the same state, one turn each: both advantages are those of grpo."""
    rows: list[Row] = [[(1, 1.0, 0)], [(1, 0.0, 0)]]
    found = advantages(inputs_of(multi_turn(rows, [0, 0])), adv_estimator="gigpo")
    one = 0.5 / (statistics.stdev([1.0, 0.0]) + 1e-6)
    assert found[:, 0].tolist() == pytest.approx([2 * one, -2 * one], rel=1e-5)


turns = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.integers(0, 2)), min_size=1, max_size=4
).filter(lambda row: any(tokens for tokens, _, _ in row))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(turns, min_size=1, max_size=6),
    seed=st.integers(0, 99),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    weights=st.sampled_from([(1.0, 1.0), (1.0, 0.0), (0.0, 2.0)]),
)
def test_turn_estimators_equal_naive_loops(
    rows: list[Row], seed: int, gamma: float, weights: tuple[float, float]
) -> None:
    groups = [(seed >> i) % 2 for i in range(len(rows))]
    inputs = inputs_of(multi_turn(rows, groups))
    width = inputs.response_mask_BR.shape[1]
    returns = advantages(inputs, adv_estimator="step_reinforce", step_reward_gamma=gamma)
    expected = per_token(rows, [naive_returns(row, gamma) for row in rows], width)
    assert torch.allclose(returns, torch.tensor(expected), atol=1e-5)
    found = advantages(
        inputs,
        adv_estimator="gigpo",
        step_reward_gamma=gamma,
        gigpo=GiGPOConfig(episode_weight=weights[0], step_weight=weights[1]),
    )
    expected = per_token(rows, naive_gigpo(rows, groups, gamma, weights), width)
    assert torch.allclose(found, torch.tensor(expected), atol=1e-4)


@pytest.mark.parametrize("name", ["gigpo", "step_reinforce"])
def test_order_and_labels_do_not_matter(name: str) -> None:
    plain = advantages(inputs_of(multi_turn(ROWS, GROUPS)), adv_estimator=name)
    order = [2, 0, 3, 1]
    renamed: list[Row] = [[(tokens, value, 1000 - 13 * state) for tokens, value, state in ROWS[i]] for i in order]
    moved = advantages(inputs_of(multi_turn(renamed, [-7 * GROUPS[i] for i in order])), adv_estimator=name)
    assert torch.allclose(moved, plain[order], atol=1e-6)


def test_the_same_state_of_another_prompt_does_not_count() -> None:
    rows: list[Row] = [[(1, 1.0, 0)], [(1, 0.0, 0)]]
    found = advantages(inputs_of(multi_turn(rows, [0, 1])), adv_estimator="gigpo")
    assert (found == 0).all()


def test_equal_returns_and_rows_without_a_token() -> None:
    rows: list[Row] = [[(1, 2.0, 0), (1, 2.0, 0)], [(2, 4.0, 5)]]
    inputs = inputs_of(multi_turn(rows, [0, 0]))
    alike = advantages(inputs, adv_estimator="gigpo", step_reward_gamma=0.0, norm_adv_by_std_in_grpo=False)
    assert (alike == 0).all()
    nothing = dataclasses.replace(inputs, response_mask_BR=torch.zeros_like(inputs.response_mask_BR))
    for name in ("gigpo", "step_reinforce"):
        assert (advantages(nothing, adv_estimator=name) == 0).all()


def test_whole_experience_of_a_multi_turn_batch() -> None:
    """The score goes on the last turn, rewards of turns stay on theirs, and both count in critic/rewards."""
    batch = multi_turn(ROWS, GROUPS)
    algorithm = AlgorithmConfig(adv_estimator="step_reinforce", step_reward_gamma=1.0)
    experience, metrics = make_experience(
        algorithm, ActorConfig(), batch, scores([10.0, 0.0, 0.0, 0.0]), evaluated(batch), 0.0
    )
    assert experience.advantages_BR[0, 0].item() == 15.0 and experience.advantages_BR[0, 5].item() == 14.0
    assert metrics["critic/rewards/max"] == 15.0 and metrics["critic/score/max"] == 10.0
    assert (experience.advantages_BR[~experience.response_mask_BR] == 0).all()


@pytest.mark.parametrize("name", ["gigpo", "step_reinforce"])
def test_a_single_turn_batch_is_refused(name: str) -> None:
    batch = rollouts((2, 2), [0, 0])
    with pytest.raises(ValueError, match=f"adv_estimator='{name}' needs turns"):
        make_experience(
            AlgorithmConfig(adv_estimator=name), ActorConfig(), batch, scores([1.0, 0.0]), evaluated(batch), 0.0
        )


def test_a_sampled_token_without_a_turn_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows \[1\] have sampled tokens without a turn"):
        turns_of(torch.tensor([[0, -1], [-1, 0]]), torch.tensor([[True, False], [True, True]]))


def test_a_turn_without_a_sampled_token_is_stepped_over() -> None:
    step, mask = torch.tensor([[0, 1, 2]]), torch.tensor([[True, False, True]])
    returns = turn_returns(turns_of(step, mask), torch.tensor([[1.0, 50.0, 4.0]]), 0.5)
    assert returns.tolist() == [[1 + 0.5 * 4, 0.0, 4.0]]


def test_turn_columns_travel_with_their_rows() -> None:
    batch = multi_turn(ROWS, GROUPS)
    parts = batch.split([1, 3])
    again = Rollouts.concat([parts[1], parts[0]]).select([3, 0, 1, 2])
    for name in ("step_T", "anchor_T", "step_rewards_T"):
        assert torch.equal(again.columns()[name], batch.columns()[name]), name  # type: ignore[arg-type]
