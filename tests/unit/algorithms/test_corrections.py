"""Importance weights and rejections: hand values, naive loops, invariances, edge cases, and their place in a step."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.algorithms.builders import denominators, evaluated, experience, outputs_for, rollouts, scores
from verl_like.algorithms.corrections import (
    bounded,
    correct,
    correct_on_driver,
    importance_weights,
    segment_mean,
    weight_of_row,
)
from verl_like.algorithms.experience import make_experience
from verl_like.algorithms.mismatch import NONFINITE, PREFIX, Gap, count_gap, finish, gap_between
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.batch import Evaluated, Experience, Rollouts, merge_metrics
from verl_like.config import ActorConfig, AlgorithmConfig, OldLogProbs, PolicyLossConfig, RolloutCorrectionConfig
from verl_like.config.correction import IS_LEVELS, RS_OPTIONS, Bounds
from verl_like.config.menus import AGGREGATIONS as LOSS_AGG_MODES

Config = RolloutCorrectionConfig
MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]]).bool()  # tool text in the first row, padding in the second
RATIO = torch.tensor([[2.0, 0.5, 7.0, 4.0, 1.0], [3.0, 3.0, 0.5, 9.0, 9.0]]).double()  # trainer / sampler


def gap(ratio: Tensor = RATIO, mask: Tensor = MASK) -> Gap:
    """Sampler at log-prob -2, trainer at that times the ratio."""
    rollout = torch.full(ratio.shape, -2.0, dtype=torch.float64)
    return gap_between(rollout + ratio.log(), rollout, mask)


def cube(x: float) -> float:
    return x ** (1 / 3)


# ---- weights


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[2, 0.5, 0, 4, 1], [3, 3, 0.5, 0, 0]]),
        ("sequence", [[4, 4, 0, 4, 4], [4.5, 4.5, 4.5, 0, 0]]),
        ("geometric", [[4**0.25, 4**0.25, 0, 4**0.25, 4**0.25], [cube(4.5)] * 3 + [0, 0]]),
        ("segment", [[1, 1, 0, 2, 2], [cube(4.5)] * 3 + [0, 0]]),
    ],
)
def test_weights_by_hand(level: str, expected: list[list[float]]) -> None:
    found = importance_weights(gap().log_ratio_BR, MASK, level)
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64))


def test_truncation_and_icepop_by_hand() -> None:
    weights = torch.tensor([0.2, 0.5, 1.0, 5.0, 9.0])
    assert bounded(weights, Bounds(None, 2.0)).tolist() == pytest.approx([0.2, 0.5, 1.0, 2.0, 2.0])
    assert bounded(weights, Bounds(0.5, 5.0)).tolist() == [0.0, 0.5, 1.0, 5.0, 0.0]
    assert bounded(weights, Bounds(None, None)) is weights


def test_segment_mean_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    mask, values = torch.rand(20, 9, generator=generator) > 0.4, torch.randn(20, 9, generator=generator)
    found = segment_mean(values, mask)
    for i in range(20):
        t = 0
        while t < 9:
            run = [t]
            while mask[i, t] and run[-1] + 1 < 9 and mask[i, run[-1] + 1]:
                run.append(run[-1] + 1)
            expected = sum(values[i, j].item() for j in run) / len(run) if mask[i, t] else 0.0
            assert [found[i, j].item() for j in run] == pytest.approx([expected] * len(run), abs=1e-6)
            t = run[-1] + 1


@pytest.mark.parametrize(
    ("level", "mean"),
    [
        ("token", (2 + 0.5 + 2 + 1 + 2 + 2 + 0.5) / 7),  # over tokens, after the cap
        ("sequence", 2.0),  # over rows
        ("segment", ((1 + 1 + 2 + 2) / 4 + cube(4.5)) / 2),
    ],
)
def test_batch_normalisation_by_hand(level: str, mean: float) -> None:
    found = correct(gap(), Config(rollout_is=level, rollout_is_batch_normalize=True))
    plain = correct(gap(), Config(rollout_is=level))
    assert found.weights_BR is not None and plain.weights_BR is not None
    assert found.norm_factor == pytest.approx(mean) and plain.norm_factor is None
    assert torch.allclose(found.weights_BR * mean, plain.weights_BR)


def metrics_of(config: Config) -> dict[str, float]:
    return finish(count_gap(gap()).joined(correct(gap(), config).tally).numbers())


def test_metrics_of_token_weights_by_hand() -> None:
    """Values are those of the weights applied, shares those of the weights before the bounds."""
    metrics = metrics_of(Config(rollout_is="token", rollout_is_threshold="0.6_3.5"))
    kept = [2, 0, 0, 1, 3, 3, 0]
    expected = {
        "mean": sum(kept) / 7,
        "max": 3,
        "min": 0,
        "seq_mean": (3 / 4 + 2) / 2,
        "seq_std": (2 - 3 / 4) / math.sqrt(2),
        "seq_max": 2,
        "seq_min": 3 / 4,
        "seq_max_deviation": 1,
        "seq_fraction_high": 0,  # raw means of the rows: 7.5 / 4, 6.5 / 3
        "seq_fraction_low": 0,
        "ratio_fraction_high": 1 / 7,
        "ratio_fraction_low": 2 / 7,
        "oob_ratio": 3 / 7,
        "eff_sample_size": sum(kept) ** 2 / (7 * sum(w * w for w in kept)),
        "std": torch.tensor(kept, dtype=torch.float64).std(correction=0).item(),
    }
    assert {n: metrics[f"rollout_corr/rollout_is_{n}"] for n in expected} == pytest.approx(expected)


def test_metrics_of_sequence_weights_by_hand() -> None:
    """Products 4 and 4.5, cut to 2; extremes are those of the products, shares those of rows (as in verl)."""
    metrics = metrics_of(Config(rollout_is="sequence", rollout_is_threshold=4.2))
    expected = {
        "mean": (4 * 4 + 3 * 4.2) / 7,
        "max": 4.5,
        "min": 4,
        "ratio_fraction_high": 1 / 2,
        "ratio_fraction_low": 0,
        "seq_mean": 4.1,
        "seq_std": 0.2 / math.sqrt(2),
        "seq_max": 4.2,
        "seq_min": 4,
        "seq_max_deviation": 3.2,
        "seq_fraction_high": 1 / 2,
        "seq_fraction_low": 0,
    }
    assert {n: metrics[f"rollout_corr/rollout_is_{n}"] for n in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("option", "values", "high", "low", "std", "masked"),
    [
        # k1 = -log ratio, bounds log 0.4 and log 1.5
        ("token_k1", [-math.log(4) / 4, -math.log(4.5) / 3], 2 / 7, 3 / 7, None, 5 / 7),
        ("seq_sum_k1", [-math.log(4), -math.log(4.5)], 0, 1, 0.0, 1),
        ("seq_mean_k1", [-math.log(4) / 4, -math.log(4.5) / 3], 0, 0, None, 0),
    ],
)
def test_metrics_of_rejections_by_hand(
    option: str, values: list[float], high: float, low: float, std: float | None, masked: float
) -> None:
    found = metrics_of(Config(rollout_rs=option, rollout_rs_threshold="0.4_1.5"))
    prefix = f"rollout_corr/rollout_rs_{option}_"
    expected = {
        "fraction_high": high,
        "fraction_low": low,
        "seq_mean": sum(values) / 2,
        "seq_std": abs(values[0] - values[1]) / math.sqrt(2),
        "seq_max": max(values),
        "seq_min": min(values),
        "seq_max_deviation": -min(values),
        "seq_fraction_high": 0,
        "seq_fraction_low": low if option == "seq_sum_k1" else 0,
        "masked_fraction": masked,
    } | ({} if std is None else {"std": std})
    assert {name: found[prefix + name] for name in expected} == pytest.approx(expected)


# ---- rejections


@pytest.mark.parametrize(
    ("option", "threshold", "expected"),
    [
        # k1 bounds the ratio sampler / trainer: 1 / RATIO
        ("token_k1", "0.3_1.5", [[1, 0, 0, 0, 1], [1, 1, 0, 0, 0]]),
        ("token_k1", 2.5, [[1, 1, 0, 0, 1], [0, 0, 1, 0, 0]]),
        ("seq_sum_k1", "0.23_0.3", [[1, 1, 0, 1, 1], [0, 0, 0, 0, 0]]),
        ("seq_mean_k1", "0.7_1.0", [[1, 1, 0, 1, 1], [0, 0, 0, 0, 0]]),
        ("segment_mean_k1", "0.6_1.0", [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]),
        ("token_k2", 0.5 * math.log(2.5) ** 2, [[1, 1, 0, 0, 1], [0, 0, 1, 0, 0]]),
        ("seq_max_k2", 0.5 * math.log(3.5) ** 2, [[0, 0, 0, 0, 0], [1, 1, 1, 0, 0]]),
        ("token_k3", 0.5, [[1, 1, 0, 0, 1], [0, 0, 1, 0, 0]]),
        ("token_diff", "-0.1_0.2", [[1, 1, 0, 0, 1], [0, 0, 1, 0, 0]]),
    ],
)
def test_rejections_by_hand(option: str, threshold: float | str, expected: list[list[int]]) -> None:
    keep = correct(gap(), Config(rollout_rs=option, rollout_rs_threshold=threshold)).keep_BR
    assert keep.int().tolist() == expected


def naive_keep(option: str, low: float, high: float) -> list[list[bool]]:
    """One token at a time; bounds on the statistic itself."""
    level, _, kind = option.rpartition("_")
    kept = []
    for i in range(2):
        values = {}
        for t in MASK[i].nonzero().flatten().tolist():
            r = RATIO[i, t].item()
            lr = math.log(r)
            q = math.exp(-2)
            values[t] = {"k1": -lr, "k2": lr * lr / 2, "k3": r - 1 - lr, "diff": q * r - q}[kind]
        runs = [[0, 1], [3, 4]] if i == 0 else [[0, 1, 2]]
        of = {t: values[t] for t in values}
        if level == "segment_mean":
            of = {t: sum(values[j] for j in run) / len(run) for run in runs for t in run}
        elif level != "token":
            join = {"seq_sum": sum, "seq_max": max, "seq_mean": lambda v: sum(v) / len(v)}[level]
            of = {t: join(list(values.values())) for t in values}
        kept.append([t in of and low <= of[t] <= high for t in range(5)])
    return kept


@pytest.mark.parametrize("option", RS_OPTIONS)
@pytest.mark.parametrize(("low", "high"), [(-0.3, 0.3), (-1.2, 0.9), (-1.6, 2.0)])
def test_every_option_against_a_loop(option: str, low: float, high: float) -> None:
    kind = option.rpartition("_")[2]
    threshold = {"k1": f"{math.exp(low)}_{math.exp(high)}", "diff": f"{low}_{high}"}.get(kind, high)
    keep = correct(gap(), Config(rollout_rs=option, rollout_rs_threshold=threshold)).keep_BR
    assert keep.tolist() == naive_keep(option, low if kind in ("k1", "diff") else -math.inf, high)


def test_options_and_veto_are_joined_by_and() -> None:
    both = Config(rollout_rs="token_k1,token_k3", rollout_rs_threshold="0.3_1.5,0.4")
    assert correct(gap(), both).keep_BR.int().tolist() == [[1, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
    veto = correct(gap(RATIO * torch.tensor([[1.0], [1e-6]])), Config(rollout_token_veto_threshold=1e-4))
    assert veto.keep_BR.any(dim=1).tolist() == [True, False]
    assert veto.tally.sums["veto_tokens"] == 3 and veto.tally.sums["vetoed_rows"] == 1


@settings(max_examples=40, deadline=None)
@given(
    level=st.sampled_from(IS_LEVELS),
    option=st.sampled_from(RS_OPTIONS),
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    padding=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
def test_row_order_and_padding_do_not_matter(
    level: str, option: str, lengths: list[int], padding: int, seed: int
) -> None:
    rows = experience(seed, tuple(lengths))
    assert rows.old_log_probs_BR is not None and rows.rollout_log_probs_BR is not None
    threshold = "-0.2_0.2" if option.endswith("diff") else 1.5
    config = Config(
        rollout_is=level, rollout_rs=option, rollout_rs_threshold=threshold, rollout_is_batch_normalize=True
    )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))

    def at(index: Tensor, width: int) -> tuple[Tensor, Tensor]:
        missing = 8 - rows.response_mask_BR.shape[1]
        columns = [
            torch.nn.functional.pad(column, (0, missing))
            for column in (rows.old_log_probs_BR, rows.rollout_log_probs_BR, rows.response_mask_BR)
        ]
        policy, rollout, mask = (torch.nn.functional.pad(c[index], (0, width)) for c in columns if c is not None)
        noise = torch.where(mask, rollout, torch.full_like(rollout, math.nan))  # whatever padding holds
        found = correct(gap_between(policy, noise, mask), config)
        assert found.weights_BR is not None and not found.weights_BR[~mask].any() and not found.keep_BR[~mask].any()
        return found.weights_BR[:, :8], found.keep_BR[:, :8]

    plain, moved = at(torch.arange(len(rows)), 0), at(order, padding)
    assert torch.allclose(moved[0], plain[0][order]) and torch.equal(moved[1], plain[1][order])


@pytest.mark.parametrize("level", IS_LEVELS)
def test_extreme_ratios_and_empty_rows(level: str) -> None:
    log_ratio = torch.tensor([[1e5, 1e5], [-1e5, -1e5], [0.0, 0.0]]).double()
    mask = torch.tensor([[True, True], [True, True], [False, False]])
    config = Config(rollout_is=level, rollout_rs="seq_max_k3", rollout_rs_threshold=10.0)
    found = correct(gap_between(log_ratio, torch.zeros_like(log_ratio), mask), config)
    assert found.weights_BR is not None
    assert found.weights_BR[0].tolist() == [2.0, 2.0]  # exp(20), capped
    assert found.weights_BR[1].tolist() == pytest.approx([math.exp(-20)] * 2)
    assert found.weights_BR[2].tolist() == [0.0, 0.0]
    assert found.keep_BR.any(dim=1).tolist() == [False, False, False]


def test_a_token_without_a_rollout_log_prob_is_rejected() -> None:
    """By itself with token weights; with its row where the weight or the rejection is the row's."""
    whole, rollout = gap(), torch.full(RATIO.shape, -2.0, dtype=torch.float64)
    rollout[0, 1], rollout[1, 2] = math.nan, -math.inf
    broken = gap_between(whole.policy_BR, rollout, MASK)
    token = correct(broken, Config(rollout_is="token"))
    assert token.keep_BR.int().tolist() == [[1, 0, 0, 1, 1], [1, 1, 0, 0, 0]]
    assert token.weights_BR is not None and token.weights_BR.isfinite().all()
    for config in (
        Config(rollout_is="sequence"),
        Config(rollout_rs="seq_mean_k3", rollout_rs_threshold=100.0),
        Config(rollout_token_veto_threshold=1e-4),
    ):
        assert not correct(broken, config).keep_BR.any()


# ---- on the driver: make_experience

ACTOR, WIDE = ActorConfig(), {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 100.0}


def credit(
    correction: Config, batch: Rollouts, said: Evaluated, actor: ActorConfig = ACTOR, estimator: str = "grpo"
) -> tuple[Experience, dict[str, float]]:
    algorithm = AlgorithmConfig(adv_estimator=estimator, rollout_correction=correction)
    values = [float(i % 2) for i in range(len(batch))]
    return make_experience(algorithm, actor, batch, scores(values), said, 0.0)


def mismatched(log_ratios: list[list[float]], groups: list[int]) -> tuple[Rollouts, Evaluated]:
    """Rollouts at -1, old log-probs at -1 + the given log ratios."""
    batch = rollouts(tuple(len(row) for row in log_ratios), groups)
    width = batch.response_mask_BR.shape[1]
    old = torch.tensor([[x - 1 for x in row] + [0.0] * (width - len(row)) for row in log_ratios])
    return batch, dataclasses.replace(evaluated(batch), old_log_probs_BR=old)


def test_weights_travel_as_a_column() -> None:
    batch, said = mismatched([[0.0, math.log(3)], [math.log(0.5)]], [0, 0])
    rows, metrics = credit(Config(rollout_is="token"), batch, said)
    assert rows.rollout_is_weights_BR is not None
    assert torch.allclose(rows.rollout_is_weights_BR, torch.tensor([[1.0, 2.0], [0.5, 0.0]]))
    assert rows.rollout_log_probs_BR is None  # measured here already
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)
    assert metrics["rollout_corr/kl"] == pytest.approx(-(math.log(3) + math.log(0.5)) / 3, rel=1e-5)
    plain, plain_metrics = credit(Config(), batch, said)
    assert plain.rollout_is_weights_BR is None
    assert plain_metrics["rollout_corr/kl"] == metrics["rollout_corr/kl"]  # measured without being asked


def test_rejected_tokens_leave_the_denominators_and_keep_their_credit() -> None:
    """A rejected last token does not take the row's score with it; a wholly rejected row stays in N_seq, as in verl."""
    batch, said = mismatched([[0.0, 0.0], [0.0, 3.0], [3.0, 3.0], [0.0, 0.0]], [0, 0, 1, 1])
    config = Config(rollout_rs="token_k1", rollout_rs_threshold=2.0)
    rows, metrics = credit(config, batch, said)
    plain, _ = credit(Config(), batch, said)
    assert rows.response_mask_BR.int().tolist() == [[1, 1], [1, 0], [0, 0], [1, 1]]
    assert torch.equal(rows.advantages_BR, plain.advantages_BR * rows.response_mask_BR)
    assert rows.advantages_BR[1, 0] > 0
    assert denominators(rows).num_tokens == 5 and denominators(rows).num_sequences == 4
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 3 / 8
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 2 / 4
    assert metrics["rollout_corr/rollout_rs_seq_dropped_fraction"] == 1 / 4
    assert metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == 3 / 8


def test_rejecting_everything_is_an_error_that_names_the_keys() -> None:
    batch, said = mismatched([[1.0], [1.0]], [0, 0])
    with pytest.raises(ValueError, match=r"rejected all 2 sampled tokens \(rollout_rs=seq_mean_k1") as caught:
        credit(Config(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.999_1.001"), batch, said)
    assert "rollout_rs_seq_mean_k1_mean': '-1'" in str(caught.value)


def test_missing_log_probs() -> None:
    batch, said = mismatched([[0.0, 0.0], [0.0, 0.0]], [0, 0])
    for key in ({"rollout_is": "token"}, WIDE, {"bypass_mode": True}):
        with pytest.raises(ValueError, match=r"algorithm\.rollout_correction needs rollout log-probs"):
            credit(Config(**key), batch.replace(rollout_log_probs_BR=None), said)
    assert batch.rollout_log_probs_BR is not None
    holed = batch.rollout_log_probs_BR.clone()
    holed[0, 1] = math.nan
    rows, metrics = credit(Config(rollout_is="token"), batch.replace(rollout_log_probs_BR=holed), said)
    assert rows.response_mask_BR.int().tolist() == [[1, 0], [1, 1]] and metrics[NONFINITE] == 1
    rows, metrics = credit(Config(), batch.replace(rollout_log_probs_BR=holed), said)
    assert rows.response_mask_BR.all() and metrics[NONFINITE] == 1  # nothing to correct: counted alone


@pytest.mark.parametrize("actor", [ActorConfig(), ActorConfig(old_log_probs=OldLogProbs.rollout)])
def test_what_the_update_must_do_itself_is_left_to_it(actor: ActorConfig) -> None:
    """Detached or bypassed old log-probs: the trainer's own are seen in the update first."""
    batch, said = mismatched([[0.0, 5.0], [0.0, 0.0]], [0, 0])
    if actor.old_log_probs == OldLogProbs.auto:
        said = dataclasses.replace(said, old_log_probs_BR=None)
    config = Config(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=2.0)
    rows, metrics = credit(config, batch, said, actor)
    assert rows.rollout_log_probs_BR is not None and rows.rollout_is_weights_BR is None
    assert rows.response_mask_BR.all() and not any(name.startswith("rollout_corr") for name in metrics)


# ---- in the loss


def loss_of(rows: Experience, objective: PolicyObjective) -> tuple[Tensor, Tensor, dict[str, float]]:
    outputs = outputs_for(rows)
    loss, metrics = objective(outputs, rows, denominators(rows))
    (gradient,) = torch.autograd.grad(loss, outputs["log_probs"])
    return loss, gradient, {name: metric.value for name, metric in metrics.items()}


def menu(loss: str, mode: str = "token-mean") -> ActorConfig:
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss), loss_agg_mode=mode)


@pytest.mark.parametrize("loss", POLICY_LOSSES.names())
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_weights_multiply_every_loss(loss: str, mode: str) -> None:
    """A weight of 3 on all tokens triples loss and gradient; weights of a row scale that row's gradient alone."""
    rows, actor = experience(3), menu(loss, mode)
    plain, gradient, _ = loss_of(rows, PolicyObjective(actor))
    tripled = rows.replace(rollout_is_weights_BR=torch.full(rows.response_mask_BR.shape, 3.0))
    found, found_gradient, _ = loss_of(tripled, PolicyObjective(actor))
    assert found.item() == pytest.approx(3 * plain.item()) and torch.allclose(found_gradient, 3 * gradient)
    per_row = torch.arange(len(rows)).double()[:, None].expand(rows.response_mask_BR.shape)
    _, row_gradient, _ = loss_of(rows.replace(rollout_is_weights_BR=per_row), PolicyObjective(actor))
    assert torch.allclose(row_gradient, per_row * gradient)


@pytest.mark.parametrize("where", ["driver", "update"])
def test_geo_mean_takes_the_geometric_mean_of_a_rows_weights(where: str) -> None:
    """Weights 4 and 1 of two tokens: 2, not 2.5. A token that the update rejects takes its share of the row's loss."""
    rows = experience(3, lengths=(2, 2), width=2).replace(response_mask_BR=torch.ones(2, 2, dtype=torch.bool))
    outputs = outputs_for(rows)
    plain, _ = PolicyObjective(menu("geo_mean"))(outputs, rows.replace(rollout_log_probs_BR=None), denominators(rows))
    ratio = torch.tensor([[4.0, 1.0], [1.0, 4.0]]).double()
    config = Config(rollout_is="token", rollout_is_threshold=10.0)
    if where == "driver":
        weighted = rows.replace(rollout_is_weights_BR=ratio, rollout_log_probs_BR=None)
    else:
        weighted = rows.replace(rollout_log_probs_BR=outputs["log_probs"].detach() - ratio.log())
    found, _ = PolicyObjective(menu("geo_mean"), config)(outputs, weighted, denominators(rows))
    assert found.item() == pytest.approx(2 * plain.item())


def test_a_weight_of_zero_does_not_silence_a_row_of_geo_mean() -> None:
    """IcePop's zeros count as 1e-10, as in verl."""
    weights, mask = torch.tensor([[0.0, 4.0, 9.0]]), torch.tensor([[True, True, False]])
    assert weight_of_row(weights, mask).tolist() == [[pytest.approx(2e-5)]]


@pytest.mark.parametrize(("mode", "step"), [("seq-mean-token-mean", 1 / 2), ("token-mean", 1.0)])
def test_rejecting_half_the_rows_does_not_double_their_step(mode: str, step: float) -> None:
    """N_seq is that of the mini-batch (as in verl); N_tok counts what is left. Advantages are 1 throughout."""
    batch, said = mismatched([[0.0, 0.0], [3.0, 3.0], [0.0, 0.0], [3.0, 3.0]], [0, 0, 1, 1])
    rows, _ = credit(Config(rollout_rs="token_k1", rollout_rs_threshold=2.0), batch, said)
    rows = rows.replace(advantages_BR=rows.response_mask_BR.double())
    _, gradient, _ = loss_of(rows, PolicyObjective(menu("policy_gradient", mode)))
    assert gradient[[0, 2]].sum().item() == pytest.approx(-step) and not gradient[[1, 3]].any()


def test_weights_leave_entropy_and_kl_alone() -> None:
    rows = experience(3).replace(rollout_is_weights_BR=torch.zeros(6, 8))
    actor = ActorConfig(entropy_coeff=0.5, use_kl_loss=True, kl_loss_coef=0.3)
    loss, _, metrics = loss_of(rows, PolicyObjective(actor))
    assert metrics["pg_loss"] == 0 and metrics["entropy"] > 0
    assert loss.item() == pytest.approx(0.3 * metrics["kl_loss"] - 0.5 * metrics["entropy"])


def test_one_update_corrects_without_a_pass_of_its_own() -> None:
    """Detached old log-probs are the update's: same loss and gradient as weights that a separate pass gave."""
    rows = experience(4)
    config = Config(rollout_is="sequence", rollout_is_threshold=1.7)
    detached = rows.replace(old_log_probs_BR=None)
    found = loss_of(detached, PolicyObjective(ActorConfig(), config))
    own = outputs_for(rows)["log_probs"].detach()
    assert rows.rollout_log_probs_BR is not None
    weights = correct(gap_between(own, rows.rollout_log_probs_BR, rows.response_mask_BR), config).weights_BR
    separate = rows.replace(old_log_probs_BR=own, rollout_is_weights_BR=weights, rollout_log_probs_BR=None)
    expected = loss_of(separate, PolicyObjective(ActorConfig(), config))
    assert found[0].item() == pytest.approx(expected[0].item()) and torch.allclose(found[1], expected[1])
    assert weights is not None and weights[rows.response_mask_BR].std() > 0.1


def test_bypass_reinforce_by_hand() -> None:
    """-w A log p, w = capped p / q as a constant, with everything but the sampled tokens at 0."""
    rows = experience(5)
    rows = rows.replace(old_log_probs_BR=rows.rollout_log_probs_BR)
    config = Config(bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_is_threshold=1.5)
    _, gradient, _ = loss_of(rows, PolicyObjective(menu("gspo"), config, two_policies=True))
    assert rows.rollout_log_probs_BR is not None
    ratio = (outputs_for(rows)["log_probs"].detach() - rows.rollout_log_probs_BR).exp().clamp(max=1.5)
    expected = -ratio * rows.advantages_BR * rows.response_mask_BR / denominators(rows).num_tokens
    assert torch.allclose(gradient, expected)


def test_bypass_with_the_ppo_clip_takes_no_weights() -> None:
    rows = experience(5)
    rows = rows.replace(old_log_probs_BR=rows.rollout_log_probs_BR)
    weighted = Config(bypass_mode=True, rollout_is="sequence")
    found = loss_of(rows, PolicyObjective(ActorConfig(), weighted, two_policies=True))
    plain = loss_of(rows, PolicyObjective(ActorConfig()))
    assert found[0].item() == plain[0].item() and torch.equal(found[1], plain[1])


def test_rejections_of_the_update_stay_in_the_denominators() -> None:
    rows = experience(6)
    rows = rows.replace(old_log_probs_BR=rows.rollout_log_probs_BR)
    config = Config(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=1.8)
    _, gradient, metrics = loss_of(rows, PolicyObjective(ActorConfig(clip_ratio=9.0), config, two_policies=True))
    _, whole, _ = loss_of(rows, PolicyObjective(ActorConfig(clip_ratio=9.0)))
    assert rows.rollout_log_probs_BR is not None
    policy = outputs_for(rows)["log_probs"].detach()
    keep = correct(gap_between(policy, rows.rollout_log_probs_BR, rows.response_mask_BR), config).keep_BR
    assert 0 < keep.sum() < rows.response_mask_BR.sum()
    assert torch.equal(gradient, whole * keep)  # 0 where rejected, and nothing else moves
    found = finish(metrics)
    kept = (keep.sum() / rows.response_mask_BR.sum()).item()
    assert found["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - kept)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize(
    "config",
    [
        Config(rollout_is="segment"),
        Config(bypass_mode=True, loss_type="reinforce", rollout_is="sequence", **WIDE),
        Config(bypass_mode=True, rollout_rs="token_k2,seq_max_k3", rollout_rs_threshold="0.3,2"),
    ],
)
def test_corrections_of_the_update_do_not_depend_on_micro_batches(config: Config, mode: str) -> None:
    rows = experience(8, (5, 3, 6, 1, 4, 2, 8))
    old = rows.rollout_log_probs_BR if config.bypass_mode else None
    rows, outputs = rows.replace(old_log_probs_BR=old), outputs_for(rows)
    objective = PolicyObjective(ActorConfig(loss_agg_mode=mode), config, two_policies=config.bypass_mode)
    whole, whole_metrics = objective(outputs, rows, denominators(rows))
    total, parts = torch.zeros((), dtype=torch.float64), []
    for index in torch.tensor([3, 0, 6, 1, 5, 2, 4]).split(2):
        micro = rows.select(index)
        width = micro.response_mask_BR.shape[1]
        loss, metrics = objective({n: v[index, :width] for n, v in outputs.items()}, micro, denominators(rows))
        total, parts = total + loss, [*parts, metrics]
    assert total.item() == pytest.approx(whole.item(), abs=1e-12)
    joined, expected = merge_metrics(parts), {n: m.value for n, m in whole_metrics.items()}
    assert {n: m.value for n, m in joined.items()} == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert any(name.startswith(PREFIX + "weight") or name.startswith(PREFIX + "rejected") for name in joined)


def test_weights_undo_a_shifted_sampler() -> None:
    """Planted fault: the engine samples from another distribution. The weighted gradient's mean is the trainer's own.

    Two actions, reward 1 for the first: E_p[reward grad log p] from samples of q needs p / q.
    """
    p, q = torch.tensor([0.3, 0.7]).double(), torch.tensor([0.6, 0.4]).double()
    reward = torch.tensor([1.0, 0.0]).double()
    actions = torch.cat([torch.zeros(6), torch.ones(4)]).long()[:, None]  # exactly q's shares
    logits = p.log().requires_grad_()
    log_probs = logits.log_softmax(-1)[actions]
    found = correct(
        gap_between(log_probs, q.log()[actions], torch.ones_like(actions, dtype=torch.bool)),
        Config(rollout_is="token", rollout_is_threshold=10.0),
    )
    assert found.weights_BR is not None
    corrected = torch.autograd.grad((found.weights_BR * reward[actions] * log_probs).mean(), logits, retain_graph=True)
    biased = torch.autograd.grad((reward[actions] * log_probs).mean(), logits, retain_graph=True)
    exact = torch.autograd.grad((logits.softmax(-1) * reward).sum(), logits)
    assert torch.allclose(corrected[0], exact[0]) and not torch.allclose(biased[0], exact[0], atol=0.05)


@pytest.mark.parametrize("seed", range(6))
def test_statistics_of_the_driver_are_those_of_the_padded_batch(seed: int) -> None:
    """Random lengths, tool text, a token without a log-prob: blocks against the whole batch, padded at once."""
    generator = torch.Generator().manual_seed(seed)
    lengths = tuple(torch.randint(1, 40, (24,), generator=generator).tolist())
    batch = rollouts(lengths, [i // 4 for i in range(24)])
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.8
    sampler = -2 * torch.rand(total, generator=generator)
    sampler[int(mask.nonzero()[0])] = float("nan")
    old = sampler.nan_to_num(-1.0) + 0.3 * torch.randn(total, generator=generator)
    batch = batch.replace(response_mask_T=mask, rollout_log_probs_T=sampler)
    said = evaluated(batch).replace(old_log_probs_T=old)
    for level in IS_LEVELS:
        config = Config(rollout_is=level, rollout_rs="seq_mean_k3,token_k1", rollout_rs_threshold="0.5,0.5_2")
        found = correct_on_driver(config, ACTOR, batch, said)
        gap = gap_between(said.old_log_probs_BR, batch.rollout_log_probs_BR, batch.response_mask_BR)
        whole = correct(gap, config)
        expected = finish(count_gap(gap).joined(whole.tally).numbers())
        assert {name: found.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert torch.equal(found.mask_T, batch.flat(whole.keep_BR))
        assert found.weights_T is not None and whole.weights_BR is not None
        assert torch.allclose(found.weights_T.double(), batch.flat(whole.weights_BR), rtol=1e-6)
