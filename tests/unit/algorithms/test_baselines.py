"""remax and the optimal token baseline: hand values, naive loops, invariances, and what they need."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.algorithms.builders import evaluated, random_mask, rollouts, scores
from verl_like.algorithms.advantages import AdvantageInputs, compute_advantages
from verl_like.algorithms.experience import make_experience
from verl_like.config import ActorConfig, AlgorithmConfig

OPTIMAL_BASELINE_ESTIMATORS = OTB, TIR = "optimal_token_baseline", "tir_optimal_token_baseline"


def advantages(name: str, inputs: AdvantageInputs) -> Tensor:
    return compute_advantages(inputs, AlgorithmConfig(adv_estimator=name)).advantages_BR


# ---- remax


def test_remax_by_hand() -> None:
    mask = torch.tensor([[True, False, True], [True, True, False]])
    rewards = torch.tensor([[0.0, 0.0, 2.0], [0.5, 1.0, 0.0]])
    inputs = AdvantageInputs(
        token_rewards_BR=rewards,
        response_mask_BR=mask,
        group_B=torch.tensor([0, 1]),
        baseline_B=torch.tensor([0.5, 1.0]),
    )
    found = compute_advantages(inputs, AlgorithmConfig(adv_estimator="remax", gamma=0.5))  # gamma is not read
    assert found.advantages_BR.tolist() == [[1.5, 0.0, 1.5], [0.5, 0.0, 0.0]]
    assert found.returns_BR.tolist() == [[2.0, 0.0, 2.0], [1.5, 1.0, 0.0]]
    assert found.metrics == {"critic/baseline/mean": 0.75}


def test_remax_works_with_one_response_and_says_what_it_lacks() -> None:
    batch = rollouts((2, 1), [0, 1])
    algorithm = AlgorithmConfig(adv_estimator="remax")
    graded = scores([1.0, 0.0]).replace(baseline_B=torch.tensor([0.0, 1.0]))
    experience, _ = make_experience(algorithm, ActorConfig(), batch, graded, evaluated(batch), 0.0)
    assert experience.advantages_BR.tolist() == [[1.0, 1.0], [-1.0, 0.0]]
    with pytest.raises(ValueError, match="remax' needs the scores of greedy responses"):
        make_experience(algorithm, ActorConfig(), batch, scores([1.0, 0.0]), evaluated(batch), 0.0)


# ---- optimal token baseline


def inputs_of(
    rewards: list[float],
    groups: list[int],
    mask: Tensor,
    p: Tensor | None = None,
    squares: Tensor | None = None,
    weights: Tensor | None = None,
) -> AdvantageInputs:
    """The reward on the last sampled token; p = probability of the token, squares = sum of squared probabilities."""
    token_rewards = torch.zeros(mask.shape)
    for i, reward in enumerate(rewards):
        if mask[i].any():
            token_rewards[i, int(mask[i].nonzero().max())] = reward
    p = torch.full(mask.shape, 0.5) if p is None else p
    return AdvantageInputs(
        token_rewards_BR=token_rewards,
        response_mask_BR=mask,
        group_B=torch.tensor(groups),
        old_log_probs_BR=p.log(),
        sum_pi_squared_BR=torch.full(mask.shape, 0.5) if squares is None else squares,
        importance_weights_BR=weights,
    )


@pytest.mark.parametrize("name", OPTIMAL_BASELINE_ESTIMATORS)
def test_by_hand(name: str) -> None:
    """w = 1 - 2p + S: 0.3, 0.7 | 0.6, 0.1, 0.5; W: 0.3, 1.0 | 0.6, 0.7, 1.2; rewards 1 and 0."""
    mask = torch.tensor([[True, True, False], [True, True, True]])
    p = torch.tensor([[0.6, 0.4, 0.5], [0.5, 0.75, 0.5]])
    squares = torch.tensor([[0.5, 0.5, 0.5], [0.6, 0.6, 0.5]])
    found = advantages(name, inputs_of([1.0, 0.0], [4, 4], mask, p, squares))
    first, second = 0.3 / 0.9, 1.0 / 1.7
    assert found[0].tolist() == pytest.approx([1 - first, 1 - second, 0.0], rel=1e-5)
    assert found[1].tolist() == pytest.approx([-first, -second, 0.0], rel=1e-5)  # alone at the end: baseline 0
    weights = torch.tensor([[2.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    scaled = advantages(name, inputs_of([1.0, 0.0], [4, 4], mask, p, squares, weights))
    assert scaled[0].tolist() == pytest.approx([1 - 1.2 / 1.8, 1 - 1.9 / 2.6, 0.0], rel=1e-5)


def test_tool_text_shifts_positions_only_for_the_plain_form() -> None:
    """Row 0 waits for a tool at position 1; its second sampled token meets row 1's second in the tir form."""
    mask = torch.tensor([[True, False, True], [True, True, False]])
    inputs = inputs_of([1.0, 0.0], [0, 0], mask)
    assert advantages(TIR, inputs).tolist() == [[0.5, 0.0, 0.5], [-0.5, -0.5, 0.0]]
    assert advantages(OTB, inputs).tolist() == [[0.5, 0.0, 1.0], [-0.5, 0.0, 0.0]]


def naive(inputs: AdvantageInputs, compact: bool) -> list[list[float]]:
    """Row by row, token by token, from the definition."""
    mask = inputs.response_mask_BR.tolist()
    assert inputs.old_log_probs_BR is not None and inputs.sum_pi_squared_BR is not None
    groups, width = inputs.group_B.tolist(), len(mask[0])
    of: list[dict[int, tuple[float, float, int]]] = []  # per row: position -> (return, energy, column)
    for i, row in enumerate(mask):
        energy, entries, columns = 0.0, {}, [t for t in range(width) if row[t]]
        for k, t in enumerate(columns):
            p, s = math.exp(inputs.old_log_probs_BR[i, t]), inputs.sum_pi_squared_BR[i, t].item()
            energy += 1 - 2 * p + s
            future = sum(inputs.token_rewards_BR[i, u].item() for u in columns[k:])
            entries[k if compact else t] = (future, energy, t)
        of.append(entries)
    found = [[0.0] * width for _ in mask]
    for i, entries in enumerate(of):
        mates = [k for k in range(len(of)) if groups[k] == groups[i]]
        for position, (future, _, column) in entries.items():
            there = [of[k][position] for k in mates if position in of[k]]
            baseline = sum(g * w for g, w, _ in there) / sum(w for _, w, _ in there) if len(there) > 1 else 0.0
            found[i][column] = future - baseline if len(mates) > 1 else 0.0
    return found


def random_inputs(seed: int, lengths: list[int], groups: list[int]) -> AdvantageInputs:
    generator = torch.Generator().manual_seed(seed)
    mask = random_mask(generator, lengths, 6)
    p = torch.rand(mask.shape, generator=generator) * 0.8 + 0.1
    squares = p**2 + (1 - p) ** 2 * torch.rand(mask.shape, generator=generator)  # between the bounds that p sets
    rewards = torch.randn(len(lengths), generator=generator).tolist()
    return inputs_of(rewards, groups, mask, p, squares)


@pytest.mark.parametrize("name", OPTIMAL_BASELINE_ESTIMATORS)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2)), min_size=1, max_size=9), seed=st.integers(0, 1000)
)
def test_equals_a_naive_loop_in_any_order(name: str, rows: list[tuple[int, int]], seed: int) -> None:
    inputs = random_inputs(seed, [n for n, _ in rows], [g for _, g in rows])
    found = advantages(name, inputs)
    expected = torch.tensor(naive(inputs, compact=name == TIR))
    assert torch.allclose(found, expected, atol=1e-4)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    columns = ("token_rewards_BR", "response_mask_BR", "group_B", "old_log_probs_BR", "sum_pi_squared_BR")
    moved = AdvantageInputs(**{name: getattr(inputs, name)[order] for name in columns})
    assert torch.allclose(advantages(name, moved), found[order], atol=1e-5)


@pytest.mark.parametrize("name", OPTIMAL_BASELINE_ESTIMATORS)
def test_edges(name: str) -> None:
    mask = torch.tensor([[True, True], [True, True], [True, False], [False, False]])
    found = advantages(name, inputs_of([0.7, 0.7, 5.0, 0.0], [0, 0, 1, 2], mask))
    assert found.abs().max() < 1e-6  # equal rewards; a group of one; an empty row
    certain = torch.ones(2, 2)  # p = 1 and no other probability: no token has energy, every row counts the same
    sure = advantages(name, inputs_of([1.0, 0.0], [0, 0], torch.ones(2, 2, dtype=torch.bool), certain, certain))
    assert sure.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    nothing = inputs_of([], [], torch.zeros(0, 3, dtype=torch.bool))
    assert len(advantages(name, nothing)) == 0
    batch = rollouts((2, 2), [0, 0])
    with pytest.raises(ValueError, match="old_log_probs=recompute"):
        make_experience(
            AlgorithmConfig(adv_estimator=name), ActorConfig(), batch, scores([1.0, 0.0]), evaluated(batch), 0.0
        )


def test_the_baseline_is_the_one_of_least_variance() -> None:
    """Monte Carlo over a softmax policy of one token: no other constant gives a gradient of less variance."""
    logits = torch.tensor([0.5, -0.2, 1.0]).double()
    p, reward = logits.softmax(-1), torch.tensor([1.0, 0.0, 3.0]).double()
    score = torch.eye(3).double() - p  # d log p(y) / d logits, a row per y
    norm = 1 - 2 * p + (p**2).sum()
    assert torch.allclose((score**2).sum(-1), norm)
    best = ((p * reward * norm).sum() / (p * norm).sum()).item()
    counts = (p * 1000).round().int().tolist()
    tokens = [y for y, n in enumerate(counts) for _ in range(n)]
    mask = torch.ones(len(tokens), 1, dtype=torch.bool)
    found = advantages(
        OTB,
        inputs_of(
            [reward[y].item() for y in tokens],
            [0] * len(tokens),
            mask,
            torch.tensor([[p[y].item()] for y in tokens]),
            torch.full(mask.shape, (p**2).sum().item()),
        ),
    )
    baseline = reward[tokens[0]].item() - found[0, 0].item()
    assert baseline == pytest.approx(best, rel=1e-2)

    def variance(b: float) -> float:
        return ((p[:, None] * ((reward - b)[:, None] * score) ** 2).sum() - ((p * reward) @ score).pow(2).sum()).item()

    assert all(variance(best) <= variance(best + step) for step in (-0.5, -0.05, 0.05, 0.5))
    assert variance(best) < variance((p * reward).sum().item())
