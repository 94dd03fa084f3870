"""Loss, gradient and metrics do not depend on micro-batches, row order or the numbers of groups.

Proved for every legal combination of loss, aggregation, KL term and options (combinations.py), also on batches that
hypothesis draws.

tests/unit/engine/test_loss_ranks.py does the same through the engine: packing, and one against two processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.algorithms.builders import MAX_RESPONSE_LENGTH, experience, outputs_for
from tests.unit.algorithms.combinations import (
    CORRECTIONS,
    KL_TERMS,
    LOSSES,
    PAIRS,
    SUBSETS,
    Combination,
    actor_of,
    covering,
    legal,
)
from verl_like.algorithms.advantages import AdvantageInputs, compute_advantages
from verl_like.algorithms.aggregate import AGGREGATIONS
from verl_like.algorithms.experience import place_on_last_token
from verl_like.algorithms.kl import KL_ESTIMATORS
from verl_like.algorithms.minibatch import denominators_of
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.algorithms.preparation import prepare_batch, prepare_minibatch
from verl_like.batch import Denominators, Experience, Metric, merge_metrics
from verl_like.config import ActorConfig, AlgorithmConfig, menus
from verl_like.flat_columns import on_rows

WIDTH = 8


@dataclass(frozen=True)
class Cut:
    """One way to compute the same thing."""

    micro: int  # rows of a micro-batch
    order: int  # seed of the permutation
    poison: bool  # NaN wherever no token was sampled


@dataclass(frozen=True)
class Answer:
    """Loss, gradients of all outputs, metrics."""

    loss: Tensor
    gradients: tuple[Tensor, ...]
    metrics: dict[str, float]


def batch(seed: int, lengths: tuple[int, ...], groups: Tensor, estimator: str) -> Experience:
    """Rows with advantages of an estimator that compares groups, so that their numbers could matter."""
    rows = experience(seed, lengths, WIDTH)
    assert rows.score_B is not None
    inputs = AdvantageInputs(
        token_rewards_T=place_on_last_token(rows.score_B, rows.response_mask_T, rows.response_length_B),
        response_mask_T=rows.response_mask_T,
        response_length_B=rows.response_length_B,
        group_B=groups,
        old_log_probs_T=rows.old_log_probs_T,
    )
    advantages_T = compute_advantages(inputs, AlgorithmConfig(adv_estimator=estimator)).advantages_T
    return rows.replace(group_B=groups, advantages_T=advantages_T.double())


def prepared(rows: Experience, actor: ActorConfig) -> tuple[Experience, Tensor, Denominators]:
    """What the driver makes of a mini-batch, and which of the rows it kept."""
    named_T = on_rows(torch.arange(len(rows), dtype=torch.int32), rows.response_length_B)
    numbered = prepare_batch(rows, actor).replace(response_ids_T=named_T)
    kept = prepare_minibatch(numbered, actor, seed=(3, 1, 0, 0))
    first_B = kept.response_length_B.cumsum(0) - kept.response_length_B
    return kept, kept.response_ids_T[first_B].long(), denominators_of(kept, MAX_RESPONSE_LENGTH)


def answer(rows: Experience, combination: Combination, seed: int, cut: Cut | None) -> Answer:
    """The whole mini-batch at once (cut None), or its pieces added up."""
    outputs = {name: value for name, value in outputs_for(rows, seed + 1).items() if name != "values"}
    kept, index, counts = prepared(rows, combination.actor)
    objective, parts = combination.objective(), list[dict[str, Metric]]()
    total = torch.stack([value.sum() for value in outputs.values()]).sum() * 0.0
    for piece in pieces(len(kept), cut):
        micro = kept.select(piece)
        width = micro.response_mask_BR.shape[1]
        inputs = {name: value[index[piece], :width] for name, value in outputs.items()}
        if cut is not None and cut.poison:
            micro, inputs = poisoned(micro, inputs)
        loss, metrics = objective(inputs, micro, counts)
        total = total + loss
        parts.append(metrics)
    gradients = torch.autograd.grad(total, list(outputs.values()))
    merged = merge_metrics(parts)
    return Answer(total.detach(), gradients, {name: metric.value for name, metric in merged.items()})


def pieces(num_rows: int, cut: Cut | None) -> list[Tensor]:
    """Rows of each micro-batch; none where no row is left: such a mini-batch is never sent."""
    if cut is None or num_rows == 0:
        return [torch.arange(num_rows)][: min(num_rows, 1)]
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(cut.order))
    return list(order.split(cut.micro))


def poisoned(rows: Experience, inputs: dict[str, Tensor]) -> tuple[Experience, dict[str, Tensor]]:
    """NaN and infinity wherever the policy sampled nothing: padding and tool text."""
    mask_BR = rows.response_mask_BR
    names = ("advantages_BR", "old_log_probs_BR", "ref_log_probs_BR", "rollout_log_probs_BR")
    changes: dict[str, Any] = {name: torch.where(mask_BR, getattr(rows, name), float("nan")) for name in names}
    changes["old_log_probs_BR"] = torch.where(mask_BR, changes["old_log_probs_BR"], -float("inf"))
    return rows.replace(**changes), {name: torch.where(mask_BR, x, float("nan")) for name, x in inputs.items()}


def assert_same(a: Answer, b: Answer) -> None:
    assert torch.allclose(a.loss, b.loss, rtol=1e-10, atol=1e-11)
    for left, right in zip(a.gradients, b.gradients, strict=True):
        assert torch.allclose(left, right, rtol=1e-10, atol=1e-11)
    assert a.metrics == pytest.approx(b.metrics, rel=1e-5, abs=1e-5)


def proves(combination: Combination, seed: int, lengths: tuple[int, ...], cut: Cut, estimator: str = "grpo") -> None:
    """One combination on one batch: another cut, and other names for the groups."""
    groups = torch.arange(len(lengths)) % 3
    renamed = torch.tensor([70, 5, 900])[groups]
    whole = answer(batch(seed, lengths, groups, estimator), combination, seed, None)
    assert_same(whole, answer(batch(seed, lengths, renamed, estimator), combination, seed, cut))


def test_nothing_registered_is_left_out() -> None:
    assert {name for name, _ in LOSSES} == set(POLICY_LOSSES.names()) == set(menus.LOSSES)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss[0]}-{loss[1].ratio_level}-{loss[1].reward_source}")
def test_every_combination(loss: Any) -> None:
    """All aggregations, KL terms, pairs of options and corrections, each on a batch and a cut of its own.

    All pairs of the first two, and all subsets of options, come with the first loss, and are among what is drawn below.
    """
    whole = loss == LOSSES[0]
    seen = list(covering(loss, whole=whole))
    assert {one.actor.loss_agg_mode for one in seen} == set(AGGREGATIONS.names())
    assert {one.actor.kl_loss_type for one in seen if one.actor.use_kl_loss} == set(KL_ESTIMATORS.names())
    assert len(seen) >= max(len(SUBSETS if whole else PAIRS), len(CORRECTIONS)), "not every subset of options comes up"
    for i, combination in enumerate(seen):
        generator = torch.Generator().manual_seed(i)
        lengths = tuple(torch.randint(1, WIDTH + 1, (6,), generator=generator).tolist())
        proves(combination, i, lengths, Cut(micro=1 + i % 4, order=i, poison=i % 2 == 0))


ACTORS = st.builds(
    actor_of,
    st.sampled_from(LOSSES),
    st.sampled_from(AGGREGATIONS.names()),
    st.sampled_from(KL_TERMS),
    st.sampled_from(SUBSETS),
).filter(legal)
COMBINATIONS = st.builds(Combination, ACTORS, st.sampled_from(CORRECTIONS))
CUTS = st.builds(Cut, micro=st.integers(1, 9), order=st.integers(0, 99), poison=st.booleans())


@settings(max_examples=120, deadline=None)
@given(
    combination=COMBINATIONS,
    cut=CUTS,
    lengths=st.lists(st.integers(1, WIDTH), min_size=1, max_size=9),
    seed=st.integers(0, 10_000),
    estimator=st.sampled_from(["grpo", "rloo", "reinforce_plus_plus_baseline"]),
)
def test_drawn_combinations_on_drawn_batches(
    combination: Combination, cut: Cut, lengths: list[int], seed: int, estimator: str
) -> None:
    proves(combination, seed, tuple(lengths), cut, estimator)


# ---- the proof can fail

ONE_ROW_EACH = Cut(micro=1, order=0, poison=False)


class MeanOfMeans(PolicyObjective):
    """A planted fault: each micro-batch divides by its own tokens and rows."""

    def __call__(self, outputs: Any, experience: Experience, denominators: Denominators) -> Any:
        return super().__call__(outputs, experience, denominators_of(experience, MAX_RESPONSE_LENGTH))


def test_a_local_denominator_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.algorithms.combinations.PolicyObjective", MeanOfMeans)
    with pytest.raises(AssertionError):
        proves(Combination(ActorConfig(), CORRECTIONS[0]), 1, (3, 5, 2, 8), Cut(micro=1, order=0, poison=False))


def test_a_weight_of_the_micro_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROLL's way: with one row to a micro-batch, every normalised weight is 1."""
    actor = actor_of(LOSSES[0], "token-mean", KL_TERMS[0], ("weights",))
    inner = PolicyObjective(actor)

    def per_micro_batch(outputs: Any, rows: Experience, counts: Denominators) -> Any:
        return inner(outputs, prepare_minibatch(rows, actor, (0,)), counts)

    monkeypatch.setattr("tests.unit.algorithms.combinations.PolicyObjective", lambda *_, **__: per_micro_batch)
    with pytest.raises(AssertionError):
        proves(Combination(actor, CORRECTIONS[0]), 1, (3, 5, 2, 8), ONE_ROW_EACH)
