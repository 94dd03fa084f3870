"""Mismatch metrics: hand values, a naive loop over tokens, parts that add up, planted shifts, odd numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.algorithms.builders import denominators, experience, outputs_for, random_mask
from verl_like.algorithms.mismatch import NONFINITE, PREFIX, Gap, count_gap, finish, gap_between
from verl_like.algorithms.objectives import PolicyObjective, as_metrics
from verl_like.batch import merge_metrics
from verl_like.config import ActorConfig
from verl_like.trainer.roles import average_steps

C = "rollout_corr/"


def measured(policy: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    return finish(count_gap(gap_between(policy, rollout, mask)).numbers())


def random_gap(seed: int, lengths: tuple[int, ...] = (5, 3, 6, 1), shift: float = 0.0, noise: float = 0.3) -> Gap:
    generator = torch.Generator().manual_seed(seed)
    mask = random_mask(generator, list(lengths), max(lengths) + 1)
    policy = -torch.rand(mask.shape, generator=generator) * 3
    return gap_between(policy, policy - shift + noise * torch.randn(mask.shape, generator=generator), mask)


def test_by_hand() -> None:
    """Trainer 0.5, 0.25 | 0.1; engine 0.4, 0.25 | 0.2."""
    policy, rollout = torch.tensor([[0.5, 0.25], [0.1, 1.0]]).log(), torch.tensor([[0.4, 0.25], [0.2, 1.0]]).log()
    found = measured(policy, rollout, torch.tensor([[True, True], [True, False]]))
    lr = [math.log(1.25), 0.0, math.log(0.5)]
    expected = {
        "training/rollout_probs_diff_mean": 0.2 / 3,
        "training/rollout_probs_diff_max": 0.1,
        C + "log_prob_gap_mean": (lr[0] - lr[2]) / 3,
        C + "log_prob_gap_max": math.log(2),
        C + "kl": -sum(lr) / 3,
        C + "k3_kl": sum(math.exp(x) - 1 - x for x in lr) / 3,
        C + "training_ppl": (math.sqrt(8) + 10) / 2,
        C + "rollout_ppl": (math.sqrt(10) + 5) / 2,
        C + "log_ppl_diff": (-lr[0] / 2 - lr[2]) / 2,
        C + "log_ppl_diff_max": math.log(2),
        C + "log_ppl_diff_min": -lr[0] / 2,
        C + "ppl_ratio": (math.sqrt(0.8) + 2) / 2,
        C + "chi2_token": (1.25**2 + 1 + 0.25) / 3 - 1,
        C + "chi2_seq": (1.25**2 + 0.25) / 2 - 1,
        C + "eff_sample_size": 2.75**2 / (3 * (1.25**2 + 1 + 0.25)),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_equals_a_naive_loop_and_torch() -> None:
    gap = random_gap(3)
    found = finish(count_gap(gap).numbers())
    p, q = gap.policy_BR[gap.mask_BR], gap.rollout_BR[gap.mask_BR]
    both = torch.stack([p.exp(), q.exp()])
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(torch.corrcoef(both)[0, 1].item())
    assert found["training/rollout_probs_diff_std"] == pytest.approx((both[0] - both[1]).abs().std(correction=0).item())
    ratios, products, ppl = [], [], []
    for i in range(len(gap.mask_BR)):
        positions = gap.mask_BR[i].nonzero().flatten().tolist()
        row = [(gap.policy_BR[i, t] - gap.rollout_BR[i, t]).item() for t in positions]
        ratios += [math.exp(x) for x in row]
        products.append(math.exp(sum(row)))
        ppl.append(math.exp(-sum(row) / len(row)))
    assert found[C + "chi2_token"] == pytest.approx(sum(r * r for r in ratios) / len(ratios) - 1)
    assert found[C + "chi2_seq"] == pytest.approx(sum(r * r for r in products) / len(products) - 1)
    assert found[C + "ppl_ratio"] == pytest.approx(sum(ppl) / len(ppl))
    assert found[C + "eff_sample_size"] == pytest.approx(sum(ratios) ** 2 / len(ratios) / sum(r * r for r in ratios))


def test_engines_that_agree_show_zero() -> None:
    gap = random_gap(1, noise=0.0)
    found = finish(count_gap(gap).numbers())
    ones = {C + "ppl_ratio", C + "eff_sample_size", "training/rollout_actor_probs_pearson_corr"}
    sizes = {C + name for name in ("training_ppl", "rollout_ppl", "training_log_ppl", "rollout_log_ppl")}
    assert all(found[name] == pytest.approx(1) for name in ones)
    assert all(value == pytest.approx(0, abs=1e-7) for name, value in found.items() if name not in ones | sizes)


@pytest.mark.parametrize("shift", [0.05, -0.3])
def test_a_shifted_engine_shows_in_every_number(shift: float) -> None:
    """Planted fault: every log-prob of the rollout engine is off by `shift` (a wrong temperature, say)."""
    found = finish(count_gap(random_gap(2, shift=shift, noise=0.0)).numbers())
    assert found[C + "kl"] == pytest.approx(-shift, rel=1e-4)
    assert found[C + "log_prob_gap_max"] == pytest.approx(abs(shift), rel=1e-4)
    assert found[C + "ppl_ratio"] == pytest.approx(math.exp(-shift), rel=1e-4)
    assert found[C + "chi2_token"] == pytest.approx(math.exp(2 * shift) - 1, rel=1e-4)
    assert found[C + "k3_kl"] > 0 and found["training/rollout_probs_diff_mean"] > 0.005


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 8), min_size=1, max_size=8).filter(any),
    cut=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_micro_batches_and_ranks_add_up(lengths: list[int], cut: int, seed: int) -> None:
    """The update's metrics, joined over parts in any order, are those of the whole batch, also with empty rows."""
    mask = torch.arange(8)[None, :] < torch.tensor(lengths)[:, None]
    rows = experience(seed, tuple(max(n, 1) for n in lengths)).replace(response_mask_BR=mask)
    outputs, objective = outputs_for(rows, seed), PolicyObjective(ActorConfig())
    assert rows.rollout_log_probs_BR is not None
    whole = measured(outputs["log_probs"], rows.rollout_log_probs_BR, rows.response_mask_BR)
    order, parts = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)), []
    for index in order.split(cut):
        part = rows.select(index)
        piece = {name: value[index, : part.response_mask_BR.shape[1]] for name, value in outputs.items()}
        parts.append(objective(piece, part, denominators(rows))[1])
    joined = finish({name: metric.value for name, metric in merge_metrics(parts).items()})
    assert {name: joined[name] for name in whole} == pytest.approx(whole, rel=1e-9, abs=1e-9)
    assert not any(name.startswith(PREFIX) for name in joined)


def test_several_optimizer_steps_count_by_their_tokens() -> None:
    """Averaging sums over optimizer steps keeps proportions: means are over all tokens, extremes stay extremes."""
    first, second = random_gap(1, lengths=(5, 3)), random_gap(2, lengths=(5, 1))
    tallies = [count_gap(gap) for gap in (first, second)]
    steps = [as_metrics(named(tally.sums), named(tally.maxima)) for tally in tallies]
    names = ("policy_BR", "rollout_BR", "mask_BR")
    joint = gap_between(*(torch.cat([getattr(gap, name) for gap in (first, second)]) for name in names))
    assert finish(average_steps(steps)) == pytest.approx(finish(count_gap(joint).numbers()))


def named(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {PREFIX + name: value for name, value in values.items()}


def test_unknown_log_probs_are_set_aside_and_counted() -> None:
    rows = experience(7, lengths=(2, 1), width=2)
    mask = torch.tensor([[True, True], [True, False]])
    rollout = torch.tensor([[0.4, math.nan], [0.2, math.nan]]).log()
    rows = rows.replace(response_mask_BR=mask, rollout_log_probs_BR=rollout, old_log_probs_BR=None)
    outputs = outputs_for(rows)
    loss, metrics = PolicyObjective(ActorConfig())(outputs, rows, denominators(rows))
    assert metrics[NONFINITE].value == 1.0 and metrics[PREFIX + "gap/tokens"].value == 2.0
    assert loss.isfinite()
    found = finish({name: metric.value for name, metric in metrics.items()})
    assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("policy, rollout", [(0.0, -1e5), (-1e5, 0.0), (-1e5, -1e5)])
def test_extreme_ratios_do_not_overflow(policy: float, rollout: float) -> None:
    full = torch.ones(2, 50, dtype=torch.bool)
    found = measured(torch.full(full.shape, policy), torch.full(full.shape, rollout), full)
    assert all(math.isfinite(value) for value in found.values())
    assert found[C + "chi2_seq"] <= math.exp(40)


def test_nothing_compared_reports_nothing() -> None:
    nothing = torch.zeros(2, 3)
    assert measured(nothing, nothing, nothing.bool()) == {}
    assert finish({"pg_loss": 1.0}) == {"pg_loss": 1.0}


def test_padding_does_not_blur_tiny_probabilities() -> None:
    """Ones in the padding that were taken off again would: p is 1e-4 here, and a row has 16,384 places."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(8, 16_384, dtype=torch.bool)
    mask[:, :40] = True
    p = (1e-4 + 1e-5 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)).clamp(min=1e-6)
    q = p * (1 + 1e-3 * torch.randn(mask.shape, generator=generator, dtype=torch.float64))
    found = finish(count_gap(gap_between(p.log(), q.log(), mask)).numbers())
    expected = torch.corrcoef(torch.stack([p[mask], q[mask]]))[0, 1].item()
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(expected, abs=1e-9)
