from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.algorithms.builders import MAX_RESPONSE_LENGTH, denominators, experience, outputs_for
from verl_like.algorithms.mismatch import PREFIX
from verl_like.algorithms.objectives import PolicyObjective, ValueObjective
from verl_like.algorithms.policy_losses import POLICY_LOSSES, PolicyBatch
from verl_like.batch import Denominators, Experience, Metric, merge_metrics
from verl_like.config import ActorConfig, CriticConfig, PolicyLossConfig
from verl_like.config.menus import AGGREGATIONS as LOSS_AGG_MODES
from verl_like.config.menus import KL_KINDS

FULL = ActorConfig(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.3, clip_ratio_high=0.28)
# A "+" kind is left out: its gradient is not that of its value (test_kl.py).
KINDS = [name for name, kind in KL_KINDS.items() if kind.code and not name.endswith("+")]


def run(
    objective: Callable, rows: Experience, outputs: dict[str, Tensor], counts: Denominators | None = None
) -> tuple[Tensor, dict[str, Metric]]:
    return objective(outputs, rows, counts or denominators(rows))


def values_of(metrics: dict[str, Metric]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


# ---- the sum of its parts


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_policy_objective_equals_a_naive_loop(mode: str) -> None:
    rows, kind = experience(0), "mse"
    outputs = outputs_for(rows)
    actor = ActorConfig(
        entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type=kind, loss_agg_mode=mode, clip_ratio_c=1.2
    )
    loss, metrics = run(PolicyObjective(actor), rows, outputs)
    assert rows.old_log_probs_BR is not None and rows.ref_log_probs_BR is not None
    pg, entropy, kl = [], [], []
    for i in range(len(rows)):
        pg.append([]), entropy.append([]), kl.append([])
        for t in rows.response_mask_BR[i].nonzero().flatten().tolist():
            lp, old = outputs["log_probs"][i, t].item(), rows.old_log_probs_BR[i, t].item()
            adv, ratio = rows.advantages_BR[i, t].item(), math.exp(lp - old)
            gain = min(ratio * adv, min(max(ratio, 0.8), 1.2) * adv)
            pg[-1].append(-(max(gain, 1.2 * adv) if adv < 0 else gain))
            entropy[-1].append(outputs["entropy"][i, t].item())
            kl[-1].append(0.5 * (lp - rows.ref_log_probs_BR[i, t].item()) ** 2)
    joined = [naive_aggregate(x, mode) for x in (pg, entropy, kl)]
    assert loss.item() == pytest.approx(joined[0] - 0.1 * joined[1] + 0.3 * joined[2])
    assert metrics["pg_loss"].value == pytest.approx(joined[0], rel=1e-5, abs=1e-6)
    assert metrics["kl_loss"].value == pytest.approx(joined[2], rel=1e-5)
    tokens = [x for row in entropy for x in row]
    assert metrics["entropy"].value == pytest.approx(sum(tokens) / len(tokens), rel=1e-5)


def naive_aggregate(rows: list[list[float]], mode: str) -> float:
    sums, lengths = [sum(row) for row in rows], [len(row) for row in rows]
    if mode.startswith("token"):
        return sum(sums) / (sum(lengths) if mode == "token-mean" else 1)
    if mode == "seq-mean-token-mean":
        return sum(s / n for s, n in zip(sums, lengths, strict=True)) / len(rows)
    return sum(sums) / len(rows) / (MAX_RESPONSE_LENGTH if mode == "seq-mean-token-sum-norm" else 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_policy_objective_finite_differences(kind: str, mode: str) -> None:
    rows, actor = experience(1), ActorConfig(entropy_coeff=0.1, use_kl_loss=True, kl_loss_type=kind, loss_agg_mode=mode)
    outputs, objective = outputs_for(rows), PolicyObjective(actor)

    def loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
        return run(objective, rows, {"log_probs": log_probs, "entropy": entropy})[0]

    assert torch.autograd.gradcheck(loss, (outputs["log_probs"], outputs["entropy"]))


def test_value_objective_finite_differences_and_metrics() -> None:
    rows, objective = experience(2), ValueObjective(CriticConfig(cliprange_value=0.5))
    outputs = outputs_for(rows)
    assert torch.autograd.gradcheck(lambda v: run(objective, rows, {"values": v})[0], (outputs["values"],))
    loss, metrics = run(objective, rows, outputs)
    assert set(metrics) == {"vf_loss", "vf_clipfrac", "vpred_mean"}
    assert metrics["vf_loss"].value == pytest.approx(loss.item(), rel=1e-5)
    expected = outputs["values"][rows.response_mask_BR].mean().item()
    assert metrics["vpred_mean"].value == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_exact_kl_comes_from_the_engine(mode: str) -> None:
    """kl_loss_type=full wants one more output, adds its aggregate, and needs no reference log-probs in the batch."""
    plain = ActorConfig(loss_agg_mode=mode)
    exact = ActorConfig(loss_agg_mode=mode, use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="full")
    assert PolicyObjective(exact).wants - PolicyObjective(plain).wants == {"full_kl"}
    rows = experience(1).replace(ref_log_probs_BR=None)
    full_kl_BR = torch.rand(rows.response_mask_BR.shape, dtype=torch.float64, requires_grad=True)
    outputs = outputs_for(rows) | {"full_kl": full_kl_BR}
    loss, metrics = run(PolicyObjective(exact), rows, outputs)
    kl = naive_aggregate([full_kl_BR[i][rows.response_mask_BR[i]].tolist() for i in range(len(rows))], mode)
    assert metrics["kl_loss"].value == pytest.approx(kl, rel=1e-5)
    without = run(PolicyObjective(plain), rows, outputs)[0]
    assert loss.item() == pytest.approx(without.item() + 0.3 * kl)
    (gradient,) = torch.autograd.grad(loss, full_kl_BR)
    assert bool((gradient[rows.response_mask_BR] > 0).all()) and not gradient[~rows.response_mask_BR].any()


# ---- every combination of loss and aggregation; invariance of the policy's: test_invariance.py


def combinations() -> list[object]:
    return [
        pytest.param(PolicyObjective(policy_config(loss, mode)), id=f"{loss}-{mode}")
        for loss in POLICY_LOSSES.names()
        for mode in LOSS_AGG_MODES
    ] + [pytest.param(ValueObjective(CriticConfig(loss_agg_mode=mode)), id=f"value-{mode}") for mode in LOSS_AGG_MODES]


def policy_config(loss: str, mode: str) -> ActorConfig:
    return ActorConfig(
        policy_loss=PolicyLossConfig(loss_mode=loss),
        loss_agg_mode=mode,
        entropy_coeff=0.1,
        use_kl_loss=True,
        kl_loss_coef=0.3,
    )


def gradients(loss: Tensor, outputs: dict[str, Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(outputs.values()), allow_unused=True, materialize_grads=True)
    return list(found)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=8),
    cut=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_micro_batches_and_order_do_not_matter_to_the_critic(
    mode: str, lengths: list[int], cut: int, seed: int
) -> None:
    """The critic's loss, gradient and metrics of the whole = those of pieces in any order."""
    objective = ValueObjective(CriticConfig(loss_agg_mode=mode))
    rows = experience(seed, tuple(lengths))
    outputs, counts = outputs_for(rows, seed + 1), denominators(rows)
    whole, whole_metrics = run(objective, rows, outputs, counts)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    total, parts = torch.zeros((), dtype=torch.float64), []
    for index in order.split(cut):
        micro = rows.select(index)
        width = micro.response_mask_BR.shape[1]
        piece = {name: value[index, :width] for name, value in outputs.items()}
        loss, metrics = run(objective, micro, piece, counts)
        total = total + loss
        parts.append(metrics)
    assert total.item() == pytest.approx(whole.item(), abs=1e-12)
    for cut_gradient, gradient in zip(gradients(total, outputs), gradients(whole, outputs), strict=True):
        assert torch.allclose(cut_gradient, gradient, atol=1e-12)
    assert values_of(merge_metrics(parts)) == pytest.approx(values_of(whole_metrics), abs=1e-5)


@pytest.mark.parametrize("objective", combinations())
def test_a_micro_batch_without_rows_adds_zero_and_keeps_the_graph(objective: Callable) -> None:
    """A rank that ran out of rows still takes part in the backward pass."""
    rows = experience(3)
    nothing = rows.select([])
    outputs = {name: value[:0, :0] for name, value in outputs_for(rows).items()}
    loss, metrics = run(objective, nothing, outputs, denominators(rows))
    assert loss.item() == 0.0 and loss.requires_grad
    assert all(math.isfinite(metric.value) for metric in metrics.values())
    loss.backward()


@pytest.mark.parametrize("objective", combinations())
def test_all_masked_rows_add_zero(objective: Callable) -> None:
    rows = experience(3)
    masked = rows.replace(response_mask_BR=torch.zeros_like(rows.response_mask_BR))
    outputs = outputs_for(rows)
    loss, metrics = run(objective, masked, outputs, denominators(masked))
    assert loss.item() == 0.0
    assert all((gradient == 0).all() for gradient in gradients(loss, outputs))
    assert all(metric.value == 0.0 for metric in metrics.values())


# ---- details


def test_detached_update_has_ratio_one_and_the_policy_gradient() -> None:
    rows = experience(4).replace(old_log_probs_BR=None)
    outputs = outputs_for(rows)
    loss, metrics = run(PolicyObjective(ActorConfig()), rows, outputs)
    assert metrics["ppo_kl"].value == 0.0 and metrics["pg_clipfrac"].value == 0.0
    (gradient,) = torch.autograd.grad(loss, outputs["log_probs"])
    assert torch.allclose(gradient, -rows.advantages_BR / denominators(rows).num_tokens)


def test_every_switch_moves_its_own_term() -> None:
    rows = experience(5)
    outputs = outputs_for(rows)

    def loss(**keys: object) -> float:
        return run(PolicyObjective(ActorConfig(**keys)), rows, outputs)[0].item()  # type: ignore[arg-type]

    plain = loss()
    assert loss(entropy_coeff=0.1) != pytest.approx(plain)
    assert loss(use_kl_loss=True, kl_loss_coef=0.5) != pytest.approx(plain)
    assert loss(kl_loss_coef=0.5, kl_loss_type="abs") == plain  # without use_kl_loss they do nothing
    assert loss(clip_ratio=0.01) != pytest.approx(plain)
    assert loss(clip_ratio_low=0.01) != pytest.approx(plain)
    assert loss(clip_ratio_high=0.01) != pytest.approx(plain)
    assert loss(clip_ratio_c=1.01) != pytest.approx(plain)
    norm = {"loss_agg_mode": "seq-mean-token-sum-norm"}
    assert loss(**norm, loss_scale_factor=4.0) == pytest.approx(loss(**norm) * MAX_RESPONSE_LENGTH / 4)


def test_metric_names_and_reductions() -> None:
    rows = experience(6)
    _, metrics = run(PolicyObjective(FULL), rows, outputs_for(rows))
    own = {name: metric for name, metric in metrics.items() if not name.startswith(PREFIX)}
    assert {metric.reduction for metric in own.values()} == {"sum"}
    assert set(own) == {
        *("pg_loss", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "entropy", "kl_loss"),
        "training/rollout_log_probs_nonfinite",
    }
    extremes = {name for name, metric in metrics.items() if metric.reduction == "max"}
    largest = ("max_difference", "max_lr_abs", "max_log_ppl", "min_log_ppl")
    assert extremes == {f"{PREFIX}gap/{name}" for name in largest}


def test_without_rollout_log_probs_there_is_nothing_to_compare() -> None:
    rows = experience(7).replace(rollout_log_probs_BR=None)
    _, metrics = run(PolicyObjective(ActorConfig()), rows, outputs_for(rows))
    assert not any(name.startswith((PREFIX, "rollout", "training")) for name in metrics)


def test_missing_columns_are_named() -> None:
    rows = experience(8)
    with pytest.raises(ValueError, match="use_kl_loss=True needs reference log-probs"):
        run(PolicyObjective(FULL), rows.replace(ref_log_probs_BR=None), outputs_for(rows))
    with pytest.raises(ValueError, match="needs values and returns"):
        run(ValueObjective(CriticConfig()), rows.replace(values_BR=None), outputs_for(rows))


def test_wrong_names_fail_when_built() -> None:
    with pytest.raises(ValueError, match=r"loss_mode='vanila': Did you mean 'vanilla'\? choose one of"):
        PolicyObjective(ActorConfig(policy_loss=PolicyLossConfig(loss_mode="vanila")))
    PolicyObjective(ActorConfig(kl_loss_type="full"))  # off: nobody asks


@pytest.mark.parametrize("objective", combinations())
def test_objectives_survive_pickling(objective: Callable) -> None:
    rows = experience(9)
    outputs = outputs_for(rows)
    copy = pickle.loads(pickle.dumps(objective))
    assert copy.wants == objective.wants  # type: ignore[attr-defined]
    assert run(copy, rows, outputs)[0].item() == run(objective, rows, outputs)[0].item()


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_a_loss_without_advantage_has_a_gradient_only_where_it_says_so(name: str) -> None:
    """So that rows without advantage may be left out of the backward pass, or must not be."""
    generator = torch.Generator().manual_seed(3)
    log_probs, old = (-2 * torch.rand(3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    log_probs.requires_grad_()
    batch = PolicyBatch(
        log_probs_BR=log_probs,
        old_log_probs_BR=old,
        advantages_BR=torch.zeros_like(old),
        mask_BR=torch.ones(3, 5, dtype=torch.bool),
        selected_BR=torch.ones(3, 5, dtype=torch.bool),
    )
    loss = POLICY_LOSSES.lookup(name)
    (gradient,) = torch.autograd.grad(loss.function(batch, ActorConfig()).loss_BR.sum(), log_probs, allow_unused=True)
    pulls = gradient is not None and bool((gradient != 0).any())
    assert pulls == loss.pulls_without_advantage


def test_rows_without_advantage_are_named_unless_another_term_needs_them() -> None:
    rows = experience(lengths=(3, 5, 1, 4))
    advantages_BR = torch.tensor([1.0, 0.0, -1.0, 0.0])[:, None].expand_as(rows.response_mask_BR)
    rows = rows.replace(advantages_BR=advantages_BR)
    assert PolicyObjective(ActorConfig()).without_gradient(rows).tolist() == [False, True, False, True]
    outside = rows.replace(advantages_BR=rows.advantages_BR.masked_fill(~rows.response_mask_BR, torch.nan))
    assert PolicyObjective(ActorConfig()).without_gradient(outside).tolist() == [False, True, False, True]
    for actor in (
        ActorConfig(entropy_coeff=0.1),
        ActorConfig(use_kl_loss=True),
        ActorConfig(sft_loss_coef=0.1),
        ActorConfig(policy_loss=PolicyLossConfig(loss_mode="dro")),
    ):
        assert PolicyObjective(actor).without_gradient(rows) is None
