from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.unit.algorithms.builders import denominators, experience, outputs_for
from verl_like.algorithms.aggregate import AGGREGATIONS, aggregate
from verl_like.algorithms.losses.clipped import vanilla
from verl_like.algorithms.objectives import clipped_value_loss, token_means
from verl_like.algorithms.policy_losses import POLICY_LOSSES, PolicyBatch, clip_range, log_ratio
from verl_like.config import ActorConfig

ALL_LOSSES = POLICY_LOSSES.names()


def batch_of(
    ratios: list[float], advantages: list[float], mask: list[bool] | None = None, selected: list[bool] | None = None
) -> PolicyBatch:
    """One row whose probability ratios are given; nothing selected unless said."""
    log_probs = torch.tensor([[math.log(r) for r in ratios]], dtype=torch.float64) - 1.0
    return PolicyBatch(
        log_probs_BR=log_probs.requires_grad_(),
        old_log_probs_BR=torch.full_like(log_probs, -1.0),
        advantages_BR=torch.tensor([advantages], dtype=torch.float64),
        mask_BR=torch.tensor([mask or [True] * len(ratios)]),
        selected_BR=torch.tensor([selected or [False] * len(ratios)]),
    )


# ratio, advantage -> loss, clipped by the bounds, clipped by the dual clip; eps 0.2 below, 0.3 above, c = 3
HAND = [
    (1.0, 2.0, -2.0, False, False),
    (1.1, 2.0, -2.2, False, False),
    (1.5, 2.0, -2.6, True, False),  # the gain stops at 1 + 0.3
    (0.5, 2.0, -1.0, False, False),  # a loss of probability is felt in full
    (0.5, -1.0, 0.8, True, False),  # the gain stops at 1 - 0.2
    (2.0, -1.0, 2.0, False, False),
    (5.0, -1.0, 3.0, False, True),  # dual clip
    (5.0, 0.0, 0.0, False, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "clipped", "dual"), HAND)
def test_vanilla_hand_values(ratio: float, advantage: float, loss: float, clipped: bool, dual: bool) -> None:
    actor = ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0)
    out = vanilla(batch_of([ratio], [advantage]), actor)
    assert out.loss_BR.item() == pytest.approx(loss)
    assert bool(out.metrics_BR["pg_clipfrac"]) is clipped
    assert bool(out.metrics_BR["pg_clipfrac_lower"]) is dual


def test_gradient_stops_where_the_loss_is_clipped() -> None:
    batch = batch_of([row[0] for row in HAND], [row[1] for row in HAND])
    out = vanilla(batch, ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0))
    (gradient,) = torch.autograd.grad(out.loss_BR.sum(), batch.log_probs_BR)
    expected = [0.0 if clipped or dual else -a * r for r, a, _, clipped, dual in HAND]
    assert gradient[0].tolist() == pytest.approx(expected)


def test_log_ratio_is_zero_outside_the_mask() -> None:
    batch = PolicyBatch(
        log_probs_BR=torch.tensor([[-1.0, float("nan"), 0.0, 40.0]]),
        old_log_probs_BR=torch.tensor([[-1.5, 0.0, -float("inf"), 0.0]]),
        advantages_BR=torch.ones(1, 4),
        mask_BR=torch.tensor([[True, False, False, True]]),
    )
    assert log_ratio(batch).tolist() == [[0.5, 0.0, 0.0, 20.0]]


def test_clip_ratio_serves_where_low_and_high_are_null() -> None:
    assert clip_range(ActorConfig(clip_ratio=0.1)) == (0.1, 0.1)
    assert clip_range(ActorConfig(clip_ratio=0.1, clip_ratio_high=0.28)) == (0.1, 0.28)
    assert clip_range(ActorConfig(clip_ratio=0.1, clip_ratio_low=0.0)) == (0.0, 0.1)


def test_dual_clip_can_be_off() -> None:
    actor = ActorConfig(clip_ratio_c=None)  # type: ignore[arg-type]
    out = vanilla(batch_of([50.0], [-1.0]), actor)
    assert out.loss_BR.item() == pytest.approx(50.0) and not out.metrics_BR["pg_clipfrac_lower"].any()


def naive_vanilla(log_prob: float, old: float, advantage: float, actor: ActorConfig) -> float:
    low, high = clip_range(actor)
    ratio = math.exp(min(max(log_prob - old, -20.0), 20.0))
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if advantage < 0:
        objective = max(objective, actor.clip_ratio_c * advantage)
    return -objective


@pytest.mark.parametrize("seed", range(5))
def test_vanilla_equals_a_naive_loop(seed: int) -> None:
    rows = experience(seed)
    log_probs = outputs_for(rows, seed + 100)["log_probs"]
    actor = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=1.5)
    out = vanilla(policy_batch(rows, log_probs), actor)
    assert rows.old_log_probs_BR is not None
    for i, t in rows.response_mask_BR.nonzero().tolist():
        expected = naive_vanilla(
            log_probs[i, t].item(), rows.old_log_probs_BR[i, t].item(), rows.advantages_BR[i, t].item(), actor
        )
        assert out.loss_BR[i, t].item() == pytest.approx(expected)


# ---- what every loss on the menu must satisfy; a new one is tested by registering it


def policy_batch(rows, log_probs: Tensor) -> PolicyBatch:  # type: ignore[no-untyped-def]
    return PolicyBatch(
        log_probs_BR=log_probs,
        old_log_probs_BR=rows.old_log_probs_BR,
        advantages_BR=rows.advantages_BR,
        mask_BR=rows.response_mask_BR,
        selected_BR=rows.selected_BR,
        score_B=rows.score_B,
    )


def total(name: str, batch: PolicyBatch, counts, mode: str = "token-mean") -> Tensor:  # type: ignore[no-untyped-def]
    entry = POLICY_LOSSES.lookup(name)
    loss = entry.function(batch, ActorConfig())
    return aggregate(loss.loss_BR, batch.mask_BR, entry.aggregation or mode, counts)


# A constant that depends on the log-probs is part of the value, not of the gradient: no finite difference sees that.
# Their gradients have tests of their own in test_loss_menu.py.
FROZEN_WEIGHT = ("cispo", "gspo_token", "topr", "vespo", "dppo_tv", "dppo_kl")
# One ratio for the row: a token's gradient holds the advantages of the whole row.
MIXES_TOKENS = ("geo_mean", "gspo", "luspo")


@pytest.mark.parametrize("mode", AGGREGATIONS.names())
@pytest.mark.parametrize("name", [name for name in ALL_LOSSES if name not in FROZEN_WEIGHT])
def test_finite_differences(name: str, mode: str) -> None:
    rows = experience(2)
    counts = denominators(rows)
    log_probs = outputs_for(rows, 3)["log_probs"]
    assert torch.autograd.gradcheck(lambda x: total(name, policy_batch(rows, x), counts, mode), (log_probs,))


@pytest.mark.parametrize("name", ALL_LOSSES)
def test_first_step_is_the_policy_gradient(name: str) -> None:
    """Where the policy has not moved yet, the gradient is that of -A * log_prob under the loss's aggregation."""
    rows = experience(4)
    rows = rows.replace(selected_BR=torch.zeros_like(rows.response_mask_BR))
    if name in MIXES_TOKENS:
        rows = rows.replace(advantages_BR=rows.advantages_BR[:, :1] * rows.response_mask_BR)
    assert rows.old_log_probs_BR is not None
    log_probs = rows.old_log_probs_BR.clone().requires_grad_()
    counts, mode = denominators(rows), POLICY_LOSSES.lookup(name).aggregation or "token-mean"
    (gradient,) = torch.autograd.grad(total(name, policy_batch(rows, log_probs), counts), log_probs)
    plain = aggregate(-rows.advantages_BR * log_probs, rows.response_mask_BR, mode, counts)
    (expected,) = torch.autograd.grad(plain, log_probs)
    assert torch.allclose(gradient, expected)
    if mode == "token-mean":
        assert torch.allclose(gradient, -rows.advantages_BR / counts.num_tokens)


@pytest.mark.parametrize("name", ALL_LOSSES)
@pytest.mark.parametrize("gap", [1e3, -1e3, 88.0, -88.0])
def test_extreme_ratios_do_not_overflow(name: str, gap: float) -> None:
    log_probs = torch.full((1, 2), gap - 1.0, requires_grad=True)
    batch = PolicyBatch(
        log_probs_BR=log_probs,
        old_log_probs_BR=torch.full((1, 2), -1.0),
        advantages_BR=torch.tensor([[1.0, -1.0]]),
        mask_BR=torch.ones(1, 2, dtype=torch.bool),
        selected_BR=torch.tensor([[True, False]]),
    )
    out = POLICY_LOSSES.lookup(name).function(batch, ActorConfig(clip_ratio_c=None))  # type: ignore[arg-type]
    out.loss_BR.sum().backward()
    assert out.loss_BR.isfinite().all()
    assert log_probs.grad is not None and log_probs.grad.isfinite().all()


@pytest.mark.parametrize("name", ALL_LOSSES)
def test_padding_cannot_poison_loss_gradient_or_metrics(name: str) -> None:
    rows = experience(5)
    counts = denominators(rows)
    mask = rows.response_mask_BR
    clean = outputs_for(rows, 6)["log_probs"]
    poisoned = torch.where(mask, clean, float("nan")).detach().requires_grad_()
    poisoned_rows = rows.replace(
        old_log_probs_BR=torch.where(mask, rows.old_log_probs_BR, -float("inf")),  # type: ignore[arg-type]
        advantages_BR=torch.where(mask, rows.advantages_BR, float("nan")),
    )
    (expected,) = torch.autograd.grad(total(name, policy_batch(rows, clean), counts), clean)
    (gradient,) = torch.autograd.grad(total(name, policy_batch(poisoned_rows, poisoned), counts), poisoned)
    assert torch.equal(gradient, expected)
    out = POLICY_LOSSES.lookup(name).function(policy_batch(poisoned_rows, poisoned), ActorConfig())
    assert all(value.isfinite() for value in token_means(out, mask, counts).values())


# ---- value loss


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped"),
    [
        (1.0, 1.0, 3.0, 2.0, False),  # 0.5 * 4
        (2.0, 1.0, 3.0, 0.5 * 1.5**2, True),  # clipped to 1.5: the larger error counts, without gradient
        (2.0, 1.0, 0.0, 2.0, False),  # moving away from the target: plain error is the larger one
        (0.0, 1.0, 0.0, 0.5 * 0.5**2, True),
    ],
)
def test_value_loss_hand_values(value: float, old: float, target: float, loss: float, clipped: bool) -> None:
    values = torch.tensor([[value]], requires_grad=True)
    out = clipped_value_loss(values, torch.tensor([[old]]), torch.tensor([[target]]), 0.5)
    assert out.loss_BR.item() == pytest.approx(loss)
    assert bool(out.metrics_BR["vf_clipfrac"]) is clipped
    out.loss_BR.sum().backward()
    assert values.grad is not None and values.grad.item() == pytest.approx(0.0 if clipped else value - target)


def test_value_loss_finite_differences() -> None:
    rows = experience(7)
    assert rows.values_BR is not None and rows.returns_BR is not None
    old, returns = rows.values_BR, rows.returns_BR
    values = outputs_for(rows, 8)["values"]
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, returns, 0.5).loss_BR, (values,))
