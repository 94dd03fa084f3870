"""Hand values, naive loops and gradients of the losses other than vanilla; test_policy_losses.py has what all share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.unit.algorithms.builders import denominators, experience, outputs_for
from tests.unit.algorithms.test_policy_losses import batch_of, policy_batch
from verl_like.algorithms.aggregate import aggregate
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.algorithms.policy_losses import POLICY_LOSSES, PolicyBatch, TokenLoss
from verl_like.batch import Experience
from verl_like.config import ActorConfig, PolicyLossConfig, ToprConfig
from verl_like.config.menus import LOSSES

ACTOR = ActorConfig(
    clip_ratio_low=0.1,
    clip_ratio_high=0.3,
    tau_pos=0.8,
    tau_neg=1.3,
    policy_loss=PolicyLossConfig(dro_beta=0.4, kimi_tau=0.6, ppo_kl_coef=0.2, topr=ToprConfig(negative_weight=0.5)),
)


def run(name: str, batch: PolicyBatch, actor: ActorConfig = ACTOR) -> TokenLoss:
    return POLICY_LOSSES.lookup(name).function(batch, actor)


def gradient_of(name: str, batch: PolicyBatch) -> list[float]:
    (gradient,) = torch.autograd.grad(run(name, batch).loss_BR.sum(), batch.log_probs_BR)
    return gradient[0].tolist()


def test_aggregation_of_gspo_is_the_papers_unless_one_is_set() -> None:
    """verl's command line is honoured; without one, rows count the same."""
    rows = experience(2)

    def value(name: str, mode: str | None) -> float:
        actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name), loss_agg_mode=mode)
        return PolicyObjective(actor)(outputs_for(rows), rows, denominators(rows))[0].item()

    for name in LOSSES:
        default = {"gspo": "seq-mean-token-mean", "gspo_token": "seq-mean-token-mean"}.get(name, "token-mean")
        if not LOSSES[name].selects:
            assert value(name, None) == value(name, default)
    for name in ("gspo", "gspo_token"):
        assert value(name, "token-mean") != pytest.approx(value(name, None))


def test_losses_that_prescribe_their_aggregation() -> None:
    entries = {name: POLICY_LOSSES.lookup(name).aggregation for name in LOSSES}
    assert {name: mode for name, mode in entries.items() if mode is not None} == {
        "geo_mean": "seq-mean-token-mean",
        "sapo": "seq-mean-token-mean",
        "luspo": "seq-mean-token-sum",
        "vespo": "token-mean",
    }


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


LP = math.log(2.0) - 1.0  # log-prob of a token with ratio 2: the old one is -1

# one token: name, ratio, advantage -> loss, gradient with respect to its log-prob
HAND = [
    ("policy_gradient", 2.0, 3.0, -3 * LP, -3.0),
    ("gpg", 2.0, -1.0, LP, 1.0),
    ("cispo", 2.0, 3.0, -1.3 * 3 * LP, -3.9),  # weight clipped at 1.3, gradient kept
    ("cispo", 2.0, -1.0, 1.3 * LP, 1.3),
    ("dro", 2.0, 3.0, -3 * LP + 0.2 * math.log(2) ** 2, -3 + 0.4 * math.log(2)),
    ("sapo", 2.0, 3.0, -3 * sigmoid(0.8) * 4 / 0.8, -3 * sigmoid(0.8) * (1 - sigmoid(0.8)) * 4 * 2),
    ("sapo", 2.0, -1.0, sigmoid(1.3) * 4 / 1.3, sigmoid(1.3) * (1 - sigmoid(1.3)) * 4 * 2),
    ("gspo", 2.0, 3.0, -3.9, 0.0),
    ("gspo", 2.0, -1.0, 2.0, 2.0),
    ("gspo", 5.0, -1.0, 5.0, 5.0),  # no dual clip
    ("gspo_token", 2.0, 3.0, -3.9, 0.0),
    ("gspo_token", 2.0, -1.0, 2.0, 2.0),
    ("geo_mean", 2.0, 3.0, -3 * math.exp(0.3), 0.0),  # bounded in log space
    ("geo_mean", 2.0, -1.0, 2.0, 2.0),
    ("geo_mean", 0.5, -1.0, math.exp(-0.1), 0.0),
    ("geo_mean", 0.5, 3.0, -1.5, -1.5),
    ("luspo", 2.0, 3.0, -3.9, 0.0),
    ("luspo", 2.0, -1.0, 2.0, 2.0),
    ("clip_cov", 2.0, 3.0, -3.9, 0.0),
    ("clip_cov", 5.0, -1.0, 5.0, 5.0),  # no dual clip
    ("kl_cov", 2.0, 3.0, -6.0, -6.0),  # no clip at all
    ("topr", 2.0, 3.0, -3 * LP, -3.0),  # good responses: plain policy gradient
    ("topr", 2.0, -1.0, 0.5 * LP, 0.5),  # bad ones: the ratio, at most 1, times negative_weight
    ("topr", 0.4, -1.0, 0.2 * (math.log(0.4) - 1), 0.2),
    ("vespo", 2.0, 3.0, -(2**2) * math.exp(-3) * 3 * LP, -(2**2) * math.exp(-3) * 3),
    ("vespo", 2.0, -1.0, 2**3 * math.exp(-2) * LP, 2**3 * math.exp(-2)),
    # old probability 1/e = 0.368: a ratio of 2 adds 0.368 (bound 0.3 above), 0.4 takes 0.22 away (bound 0.1 below)
    ("dppo_tv", 2.0, 3.0, 0.0, 0.0),
    ("dppo_tv", 1.5, 3.0, -1.5 * 3 * (math.log(1.5) - 1), -4.5),  # adds 0.184
    ("dppo_tv", 2.0, -1.0, 2 * LP, 2.0),
    ("dppo_tv", 0.4, -1.0, 0.0, 0.0),
    ("dppo_tv", 0.4, 3.0, -0.4 * 3 * (math.log(0.4) - 1), -1.2),
    # binary KL of 0.368 from 0.736: 0.297; from 0.884: 0.749; from 0.147: 0.148
    ("dppo_kl", 2.4, 3.0, 0.0, 0.0),
    ("dppo_kl", 2.0, 3.0, -2 * 3 * LP, -6.0),
    ("dppo_kl", 2.0, -1.0, 2 * LP, 2.0),  # outside 0.1, but the gradient leads back
    ("dppo_kl", 0.4, -1.0, 0.0, 0.0),
    ("kimi", 2.0, 3.0, -3 * LP + 0.3 * math.log(2) ** 2, -3 + 0.6 * math.log(2)),
]


@pytest.mark.parametrize(("name", "ratio", "advantage", "loss", "slope"), HAND)
def test_hand_values(name: str, ratio: float, advantage: float, loss: float, slope: float) -> None:
    batch = batch_of([ratio], [advantage])
    assert run(name, batch).loss_BR.item() == pytest.approx(loss)
    assert gradient_of(name, batch) == pytest.approx([slope])


def test_gspo_of_two_tokens_by_hand() -> None:
    """Ratios 1.21 and 1: the row's ratio is 1.1, the geometric mean; tool text does not count."""
    batch = batch_of([1.21, 7.0, 1.0], [2.0, 9.0, 2.0], [True, False, True])
    for name in ("gspo", "gspo_token"):
        out = run(name, batch)
        assert out.loss_BR[0, [0, 2]].tolist() == pytest.approx([-2.2, -2.2])
        assert not out.metrics_BR["pg_clipfrac"].any()
        (gradient,) = torch.autograd.grad((out.loss_BR * batch.mask_BR).sum(), batch.log_probs_BR)
        assert gradient[0].tolist() == pytest.approx([-2.2, 0.0, -2.2])


def test_geo_mean_of_two_tokens_by_hand() -> None:
    """A is the mean of the row; the token above 1.3 counts as e^0.3 and has no gradient."""
    batch = batch_of([2.0, 0.9], [1.0, 3.0])
    ratio = math.sqrt(math.exp(0.3) * 0.9)
    out = run("geo_mean", batch)
    assert out.loss_BR[0].tolist() == pytest.approx([-2 * ratio] * 2)
    assert out.metrics_BR["pg_clipfrac"].tolist() == [[True, False]]
    assert not out.metrics_BR["pg_clipfrac_lower"].any()
    (gradient,) = torch.autograd.grad(out.loss_BR.mean(), batch.log_probs_BR)
    assert gradient[0].tolist() == pytest.approx([0.0, -2 * ratio / 2])


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_geo_mean_counts_a_bound_where_it_acts(advantage: float) -> None:
    """Upper bound 0.3 for good tokens, lower bound -0.1 for bad ones; the other side is not bounded."""
    metrics = run("geo_mean", batch_of([2.0, 0.5, 1.05], [advantage] * 3)).metrics_BR
    assert metrics["pg_clipfrac"].tolist() == [[advantage > 0, False, False]]
    assert metrics["pg_clipfrac_lower"].tolist() == [[False, advantage < 0, False]]


def test_clip_cov_leaves_what_the_clip_cut_off() -> None:
    """Both tokens are selected; the first, beyond 1.3 by now, keeps the clip's loss and counts as clipped."""
    out = run("clip_cov", dataclasses.replace(batch_of([2.0, 1.0], [3.0, 3.0]), selected_BR=torch.ones(1, 2).bool()))
    assert out.loss_BR[0].tolist() == pytest.approx([-3.9, 0.0])
    assert out.metrics_BR["pg_clipfrac"].tolist() == [[True, False]]
    assert out.metrics_BR["selected_frac"].tolist() == [[False, True]]


def test_gspo_token_keeps_credit_on_its_token() -> None:
    batch = batch_of([1.0, 1.0], [1.0, -3.0])
    assert gradient_of("gspo_token", batch) == pytest.approx([-1.0, 3.0])
    assert gradient_of("gspo", batch) == pytest.approx([1.0, 1.0])  # the mean of the row's advantages, on each


# ---- naive loops: a row is a list of (log_prob, old, advantage, selected)

Row = list[tuple[float, float, float, bool]]


def mean_log_ratio(row: Row) -> float:
    return sum(lp - old for lp, old, *_ in row) / len(row)


def naive_gspo(row: Row) -> list[float]:
    ratio = math.exp(mean_log_ratio(row))
    return [-min(ratio * a, min(max(ratio, 0.9), 1.3) * a) for _, _, a, _ in row]


def naive_geo_mean(row: Row) -> list[float]:
    total = 0.0
    for lp, old, a, _ in row:
        total += min(lp - old, 0.3) if a > 0 else max(lp - old, -0.1)
    return [-sum(a for _, _, a, _ in row) / len(row) * math.exp(total / len(row))] * len(row)


def naive_sapo(row: Row) -> list[float]:
    taus = [0.8 if a > 0 else 1.3 for _, _, a, _ in row]
    return [-a * sigmoid(t * (math.exp(lp - old) - 1)) * 4 / t for (lp, old, a, _), t in zip(row, taus, strict=True)]


def naive_clip_cov(row: Row) -> list[float]:
    losses = []
    for lp, old, a, selected in row:
        ratio = math.exp(lp - old)
        bounded = min(max(ratio, 0.9), 1.3) * a
        losses.append(0.0 if selected and bounded >= ratio * a else -min(ratio * a, bounded))
    return losses


def naive_topr(row: Row) -> list[float]:
    bad = sum(a for _, _, a, _ in row) < 0
    ratio = math.prod(math.exp(lp - old) for lp, old, *_ in row)
    weight = 0.5 * min(ratio, 1.0) if bad else 1.0
    return [-weight * a * lp for lp, _, a, _ in row]


def naive_vespo(row: Row) -> list[float]:
    w = math.prod(math.exp(lp - old) for lp, old, *_ in row)
    kernels = [w**2 * math.exp(3 * (1 - w)) if a >= 0 else w**3 * math.exp(2 * (1 - w)) for _, _, a, _ in row]
    return [-phi * a * lp for phi, (lp, _, a, _) in zip(kernels, row, strict=True)]


def naive_dppo(row: Row, *, kl: bool) -> list[float]:
    losses = []
    for lp, old, a, _ in row:
        p, q = math.exp(lp), math.exp(old)
        distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) if kl else abs(p - q)
        away = (p > q) if a > 0 else (p < q)
        inside = distance <= (0.3 if a > 0 else 0.1) or not away
        losses.append(-min(p / q, 3.0) * a * lp if inside else 0.0)
    return losses


def naive_kimi(row: Row) -> list[float]:
    total = sum(lp - old for lp, old, *_ in row)
    return [-a * lp + 0.3 * total**2 / len(row) for lp, _, a, _ in row]


NAIVE: dict[str, Callable[[Row], list[float]]] = {
    "gspo": naive_gspo,
    "gspo_token": naive_gspo,
    "geo_mean": naive_geo_mean,
    "sapo": naive_sapo,
    "luspo": naive_gspo,
    "clip_cov": naive_clip_cov,
    "kl_cov": lambda row: [-a * math.exp(lp - old) + 0.2 * abs(lp - old) * chosen for lp, old, a, chosen in row],
    "topr": naive_topr,
    "vespo": naive_vespo,
    "dppo_tv": lambda row: naive_dppo(row, kl=False),
    "dppo_kl": lambda row: naive_dppo(row, kl=True),
    "kimi": naive_kimi,
    "cispo": lambda row: [-min(max(math.exp(lp - old), 0.9), 1.3) * a * lp for lp, old, a, _ in row],
    "dro": lambda row: [-(lp * a - 0.2 * (lp - old) ** 2) for lp, old, a, _ in row],
    "gpg": lambda row: [-lp * a for lp, _, a, _ in row],
    "policy_gradient": lambda row: [-lp * a for lp, _, a, _ in row],
}


def as_log_probs(rows: Experience) -> Experience:
    """The builder's old log-probs are merely near a typical log-prob; these are negative, as real ones."""
    assert rows.old_log_probs_BR is not None
    return rows.replace(old_log_probs_BR=-rows.old_log_probs_BR.abs())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAIVE)
def test_losses_equal_a_naive_loop(name: str, seed: int) -> None:
    rows = as_log_probs(experience(seed))
    log_probs = -outputs_for(rows, seed + 100)["log_probs"].abs()
    assert rows.old_log_probs_BR is not None and rows.selected_BR is not None
    loss_BR = run(name, policy_batch(rows, log_probs)).loss_BR
    for i, mask in enumerate(rows.response_mask_BR):
        columns = (log_probs[i], rows.old_log_probs_BR[i], rows.advantages_BR[i], rows.selected_BR[i])
        row: Row = list(zip(*(column[mask].tolist() for column in columns), strict=True))
        assert loss_BR[i][mask].tolist() == pytest.approx(NAIVE[name](row))


def test_every_loss_but_vanilla_has_a_naive_loop() -> None:
    assert set(NAIVE) == set(LOSSES) - {"vanilla"}


# ---- gradients that finite differences do not see


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["cispo", "topr", "vespo", "dppo_tv", "dppo_kl"])
def test_gradient_takes_the_weight_as_a_constant(name: str, seed: int) -> None:
    """The loss is weight * -A * log_prob (the naive loops prove its value), so its gradient is loss / log_prob."""
    rows = as_log_probs(experience(seed))
    log_probs = outputs_for(rows, seed + 50)["log_probs"].detach().abs().neg().requires_grad_()
    loss_BR = run(name, policy_batch(rows, log_probs)).loss_BR
    mask_BR = rows.response_mask_BR
    (gradient,) = torch.autograd.grad(loss_BR[mask_BR].sum(), log_probs)
    assert torch.allclose(gradient[mask_BR], (loss_BR / log_probs)[mask_BR])
    assert (gradient[~mask_BR] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_gspo_and_gspo_token_agree_where_a_row_has_one_advantage(seed: int) -> None:
    """gspo's gradient is proved by finite differences; so is gspo_token's, then. Weights of tokens make them differ."""
    rows = experience(seed)
    rows = rows.replace(advantages_BR=rows.advantages_BR[:, :1] * rows.response_mask_BR)
    log_probs, counts = outputs_for(rows, seed + 50)["log_probs"], denominators(rows)

    def gradient(name: str, weight_BR: Tensor | float = 1.0) -> Tensor:
        loss_BR = run(name, policy_batch(rows, log_probs)).loss_BR * weight_BR
        total = aggregate(loss_BR, rows.response_mask_BR, "seq-mean-token-mean", counts)
        return torch.autograd.grad(total, log_probs)[0]

    assert torch.allclose(gradient("gspo"), gradient("gspo_token"))
    weight_R = torch.linspace(0.5, 2.0, log_probs.shape[1])
    assert not torch.allclose(gradient("gspo", weight_R), gradient("gspo_token", weight_R), atol=1e-2)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("gap", [1e3, -1e3, 88.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_row_that_went_far_on_one_side_stays_finite(name: str, gap: float, advantage: float) -> None:
    log_probs = torch.full((2, 3), gap, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    columns = {"old_log_probs_BR": torch.zeros(2, 3), "advantages_BR": torch.full((2, 3), advantage), "mask_BR": mask}
    columns["selected_BR"] = mask & torch.tensor([True, False, False])
    out = run(name, PolicyBatch(log_probs_BR=log_probs, **columns))
    (gradient,) = torch.autograd.grad(out.loss_BR[mask].sum(), log_probs)
    assert out.loss_BR[mask].isfinite().all() and gradient.isfinite().all() and (gradient[~mask] == 0).all()


# ---- forms that a default configuration does not show


@pytest.mark.parametrize("seed", range(3))
def test_luspo_is_gspo_times_the_length_of_each_row(seed: int) -> None:
    rows = experience(seed)
    log_probs, counts = outputs_for(rows, seed + 50)["log_probs"], denominators(rows)
    batch = policy_batch(rows, log_probs)
    luspo = aggregate(run("luspo", batch).loss_BR, batch.mask_BR, "seq-mean-token-sum", counts)
    gspo_BR, length_B = run("gspo", batch).loss_BR, batch.mask_BR.sum(dim=1)
    per_row = [gspo_BR[i][mask].mean() * n for i, (mask, n) in enumerate(zip(batch.mask_BR, length_B, strict=True))]
    assert luspo.item() == pytest.approx(torch.stack(per_row).mean().item())


def topr(level: str, source: str) -> ActorConfig:
    options = ToprConfig(ratio_level=level, reward_source=source, positive_weight=2.0, negative_weight=0.5)  # type: ignore[arg-type]
    return ActorConfig(policy_loss=PolicyLossConfig(topr=options))


def test_topr_by_token_takes_each_tokens_own_ratio_and_sign() -> None:
    batch = batch_of([0.5, 0.8, 3.0], [1.0, -1.0, -2.0])
    (gradient,) = torch.autograd.grad(run("topr", batch, topr("token", "advantage")).loss_BR.sum(), batch.log_probs_BR)
    assert gradient[0].tolist() == pytest.approx([-2.0, 0.5 * 0.8, 2 * 0.5])


def test_topr_by_row_takes_the_product_and_the_sign_of_the_mean() -> None:
    batch = batch_of([0.5, 0.8, 1.5], [1.0, -1.0, -2.0])
    out = run("topr", batch, topr("seq", "advantage"))
    (gradient,) = torch.autograd.grad(out.loss_BR.sum(), batch.log_probs_BR)
    weight = 0.5 * 0.6  # 0.5 x 0.8 x 1.5
    assert gradient[0].tolist() == pytest.approx([-weight, weight, 2 * weight])
    assert not out.metrics_BR["pg_clipfrac"].any()


@pytest.mark.parametrize("level", ["seq", "token"])
def test_topr_from_scores_ignores_the_advantages(level: str) -> None:
    batch = batch_of([0.5, 0.8], [7.0, -7.0])
    for score, weights in ((1.0, [2.0, 2.0]), (0.0, [0.0, 0.0]), (-1.0, None)):
        scored = dataclasses.replace(batch, score_B=torch.tensor([score]))
        (gradient,) = torch.autograd.grad(run("topr", scored, topr(level, "score")).loss_BR.sum(), batch.log_probs_BR)
        bad = [0.5 * 0.4, 0.5 * 0.4] if level == "seq" else [0.5 * 0.5, 0.5 * 0.8]
        assert gradient[0].tolist() == pytest.approx(bad if weights is None else [-w for w in weights])
    with pytest.raises(ValueError, match="reward_source=score needs the scores"):
        run("topr", batch, topr(level, "score"))


def test_losses_that_need_a_selection_say_so() -> None:
    batch = dataclasses.replace(batch_of([1.0], [1.0]), selected_BR=None)
    for name in ("clip_cov", "kl_cov"):
        with pytest.raises(ValueError, match="need tokens selected over the mini-batch"):
            run(name, batch)


def test_vespo_fades_on_both_sides_and_peaks_at_k_over_lambda() -> None:
    def weight(ratio: float) -> float:
        return run("vespo", batch_of([ratio], [1.0])).metrics_BR["vespo_weight"].item()

    assert weight(1.0) == pytest.approx(1.0)
    assert weight(1e-3) < 1e-4 and weight(30.0) < 1e-30
    assert weight(2 / 3) > max(weight(0.6), weight(0.75))
