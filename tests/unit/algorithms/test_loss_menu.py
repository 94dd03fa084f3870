"""Hand values, naive loops and gradients of the losses other than vanilla; test_policy_losses.py has what all share."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.unit.algorithms.builders import denominators, experience, outputs_for
from tests.unit.algorithms.test_policy_losses import batch_of, policy_batch
from verl_like.algorithms.aggregate import aggregate
from verl_like.algorithms.policy_losses import POLICY_LOSSES, PolicyBatch, TokenLoss
from verl_like.config import ActorConfig, PolicyLossConfig
from verl_like.config.enums import LOSS_MODES

ACTOR = ActorConfig(
    clip_ratio_low=0.1, clip_ratio_high=0.3, tau_pos=0.8, tau_neg=1.3, policy_loss=PolicyLossConfig(dro_beta=0.4)
)


def run(name: str, batch: PolicyBatch, actor: ActorConfig = ACTOR) -> TokenLoss:
    return POLICY_LOSSES.lookup(name).function(batch, actor)


def gradient_of(name: str, batch: PolicyBatch) -> list[float]:
    (gradient,) = torch.autograd.grad(run(name, batch).loss_BR.sum(), batch.log_probs_BR)
    return gradient[0].tolist()


def test_configuration_offers_the_menu() -> None:
    assert sorted(LOSS_MODES) == POLICY_LOSSES.names()


def test_sequence_losses_prescribe_their_aggregation() -> None:
    fixed = {name for name in LOSS_MODES if POLICY_LOSSES.lookup(name).aggregation == "seq-mean-token-mean"}
    assert fixed == {"gspo", "gspo_token", "sapo", "geo_mean"}


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
    (gradient,) = torch.autograd.grad(out.loss_BR.mean(), batch.log_probs_BR)
    assert gradient[0].tolist() == pytest.approx([0.0, -2 * ratio / 2])


def test_gspo_token_keeps_credit_on_its_token() -> None:
    batch = batch_of([1.0, 1.0], [1.0, -3.0])
    assert gradient_of("gspo_token", batch) == pytest.approx([-1.0, 3.0])
    assert gradient_of("gspo", batch) == pytest.approx([1.0, 1.0])  # the mean of the row's advantages, on each


# ---- naive loops: a row is a list of (log_prob, old, advantage)

Row = list[tuple[float, float, float]]


def mean_log_ratio(row: Row) -> float:
    return sum(lp - old for lp, old, _ in row) / len(row)


def naive_gspo(row: Row) -> list[float]:
    ratio = math.exp(mean_log_ratio(row))
    return [-min(ratio * a, min(max(ratio, 0.9), 1.3) * a) for _, _, a in row]


def naive_geo_mean(row: Row) -> list[float]:
    total = 0.0
    for lp, old, a in row:
        total += min(lp - old, 0.3) if a > 0 else max(lp - old, -0.1)
    return [-sum(a for _, _, a in row) / len(row) * math.exp(total / len(row))] * len(row)


def naive_sapo(row: Row) -> list[float]:
    taus = [0.8 if a > 0 else 1.3 for _, _, a in row]
    return [-a * sigmoid(t * (math.exp(lp - old) - 1)) * 4 / t for (lp, old, a), t in zip(row, taus, strict=True)]


NAIVE: dict[str, Callable[[Row], list[float]]] = {
    "gspo": naive_gspo,
    "gspo_token": naive_gspo,
    "geo_mean": naive_geo_mean,
    "sapo": naive_sapo,
    "cispo": lambda row: [-min(max(math.exp(lp - old), 0.9), 1.3) * a * lp for lp, old, a in row],
    "dro": lambda row: [-(lp * a - 0.2 * (lp - old) ** 2) for lp, old, a in row],
    "gpg": lambda row: [-lp * a for lp, _, a in row],
    "policy_gradient": lambda row: [-lp * a for lp, _, a in row],
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAIVE)
def test_losses_equal_a_naive_loop(name: str, seed: int) -> None:
    rows = experience(seed)
    log_probs = outputs_for(rows, seed + 100)["log_probs"]
    assert rows.old_log_probs_BR is not None
    loss_BR = run(name, policy_batch(rows, log_probs)).loss_BR
    for i, mask in enumerate(rows.response_mask_BR):
        columns = (log_probs[i], rows.old_log_probs_BR[i], rows.advantages_BR[i])
        row: Row = list(zip(*(column[mask].tolist() for column in columns), strict=True))
        assert loss_BR[i][mask].tolist() == pytest.approx(NAIVE[name](row))


def test_every_loss_but_vanilla_has_a_naive_loop() -> None:
    assert set(NAIVE) == set(LOSS_MODES) - {"vanilla"}


# ---- gradients that finite differences do not see


def frozen_cispo(log_probs: Tensor, weight: Tensor, rows) -> Tensor:  # type: ignore[no-untyped-def]
    return -weight * rows.advantages_BR * log_probs


@pytest.mark.parametrize("seed", range(3))
def test_cispo_gradient_takes_the_weight_as_a_constant(seed: int) -> None:
    rows = experience(seed)
    log_probs = outputs_for(rows, seed + 50)["log_probs"]
    (gradient,) = torch.autograd.grad(run("cispo", policy_batch(rows, log_probs)).loss_BR.sum(), log_probs)
    weight = (log_probs - rows.old_log_probs_BR).exp().clamp(0.9, 1.3).detach()
    (expected,) = torch.autograd.grad(frozen_cispo(log_probs, weight, rows).sum(), log_probs)
    assert torch.allclose(gradient, expected)


@pytest.mark.parametrize("seed", range(3))
def test_gspo_and_gspo_token_agree_where_a_row_has_one_advantage(seed: int) -> None:
    """gspo's gradient is proved by finite differences; so is gspo_token's, then."""
    rows = experience(seed)
    rows = rows.replace(advantages_BR=rows.advantages_BR[:, :1] * rows.response_mask_BR)
    log_probs, counts = outputs_for(rows, seed + 50)["log_probs"], denominators(rows)

    def gradient(name: str) -> Tensor:
        loss_BR = run(name, policy_batch(rows, log_probs)).loss_BR
        total = aggregate(loss_BR, rows.response_mask_BR, "seq-mean-token-mean", counts)
        return torch.autograd.grad(total, log_probs)[0]

    assert torch.allclose(gradient("gspo"), gradient("gspo_token"))


@pytest.mark.parametrize("name", LOSS_MODES)
@pytest.mark.parametrize("gap", [1e3, -1e3, 88.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_row_that_went_far_on_one_side_stays_finite(name: str, gap: float, advantage: float) -> None:
    log_probs = torch.full((2, 3), gap, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    columns = {"old_log_probs_BR": torch.zeros(2, 3), "advantages_BR": torch.full((2, 3), advantage), "mask_BR": mask}
    out = run(name, PolicyBatch(log_probs_BR=log_probs, **columns))
    (gradient,) = torch.autograd.grad(out.loss_BR[mask].sum(), log_probs)
    assert out.loss_BR[mask].isfinite().all() and gradient.isfinite().all() and (gradient[~mask] == 0).all()


def test_every_knob_moves_its_loss_and_no_other() -> None:
    rows = experience(6)
    log_probs = outputs_for(rows, 7)["log_probs"].detach()

    def value(name: str, **keys: object) -> float:
        dro_beta = keys.pop("dro_beta", 0.1)
        actor = ActorConfig(policy_loss=PolicyLossConfig(dro_beta=dro_beta), **keys)  # type: ignore[arg-type]
        return run(name, policy_batch(rows, log_probs), actor).loss_BR[rows.response_mask_BR].sum().item()

    readers = {
        "tau_pos": {"sapo"},
        "tau_neg": {"sapo"},
        "dro_beta": {"dro"},
        "clip_ratio_low": {"vanilla", "cispo", "gspo", "gspo_token", "geo_mean"},
        "clip_ratio_high": {"vanilla", "cispo", "gspo", "gspo_token", "geo_mean"},
    }
    for key, names in readers.items():
        setting = {key: 0.01 if key.startswith("clip") else 3.0}
        assert {name for name in LOSS_MODES if value(name, **setting) != value(name)} == names, key
