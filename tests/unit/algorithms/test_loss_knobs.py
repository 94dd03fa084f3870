"""Each knob of the policy's update changes the number it should, and only that; the doctor's tables are true."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.algorithms.builders import MAX_RESPONSE_LENGTH, experience, outputs_for
from verl_like.algorithms.aggregate import AGGREGATIONS
from verl_like.algorithms.minibatch import denominators_of
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.algorithms.policy_losses import POLICY_LOSSES
from verl_like.algorithms.preparation import prepare_batch, prepare_minibatch
from verl_like.batch import Experience
from verl_like.config import ActorConfig, PolicyLossConfig, SampleWeightConfig, ToprConfig
from verl_like.config.menus import LOSSES as ROWS
from verl_like.config.menus import readers

LOSSES = POLICY_LOSSES.names()
READ_BY = readers(ROWS)
# Values far enough from the defaults to show in a random batch.
OTHER = {
    "clip_ratio": 0.01,
    "clip_ratio_low": 0.01,
    "clip_ratio_high": 0.01,
    "clip_ratio_c": 1.01,
    "clip_cov_ratio": 0.9,
    "clip_cov_lb": 2.0,
    "clip_cov_ub": 0.6,
    "kl_cov_ratio": 0.9,
    "ratio_level": "token",
    "reward_source": "score",
}
WIDE = {"clip_cov_lb": 0.1, "clip_cov_ub": 5.0, "clip_cov_ratio": 0.3}  # a window in which this small batch has tokens


def with_key(key: str | None, value: Any, **actor: Any) -> ActorConfig:
    """An actor's options with one key, dotted below `actor`, set."""
    parts = [] if key is None else key.split(".")
    loss, topr = dict(actor.pop("policy_loss", {})), {}
    if parts[:-1] == []:
        actor |= {parts[0]: value} if parts else {}
    elif parts[:-1] == ["policy_loss"]:
        loss[parts[-1]] = value
    else:
        topr = {parts[-1]: value}
    return ActorConfig(policy_loss=PolicyLossConfig(topr=ToprConfig(**topr), **loss), **actor)


def other_value(key: str) -> Any:
    name = key.rsplit(".", 1)[-1]
    if name in OTHER:
        return OTHER[name]
    sections = {"policy_loss": PolicyLossConfig(), "policy_loss.topr": ToprConfig()}
    return 2.5 * getattr(sections.get(key.rpartition(".")[0], ActorConfig()), name)


def numbers(actor: ActorConfig, rows: Experience | None = None) -> dict[str, float]:
    """Loss, gradient and metrics of one mini-batch, as the driver prepares it and the worker computes it."""
    rows = experience(6, lengths=(8, 5, 7, 3, 6, 8, 2, 4)) if rows is None else rows
    outputs = outputs_for(rows, 7)
    kept = prepare_minibatch(prepare_batch(number_rows(rows), actor), actor, (0,))
    index = kept.group_B
    inputs = {name: value[index][:, : kept.response_mask_BR.shape[1]] for name, value in outputs.items()}
    loss, metrics = PolicyObjective(actor)(inputs, kept, denominators_of(kept, MAX_RESPONSE_LENGTH))
    leaves = [outputs["log_probs"], outputs["entropy"]]
    gradient = torch.cat(torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True))
    return {"loss": loss.item(), "gradient": weigh(gradient)} | {name: m.value for name, m in metrics.items()}


def number_rows(rows: Experience) -> Experience:
    """group_B tells the rows apart, so that the kept ones can be found again."""
    return rows.replace(group_B=torch.arange(len(rows)))


def weigh(gradient: Tensor) -> float:
    """One number that sees every entry."""
    return float((gradient * torch.linspace(1, 2, gradient.numel()).view_as(gradient)).sum())


@pytest.mark.parametrize("key", READ_BY)
def test_which_loss_reads_which_knob(key: str) -> None:
    readers = set()
    for name in LOSSES:
        loss = {"loss_mode": name, "ppo_kl_coef": 0.3, "kl_cov_ratio": 0.3} | WIDE
        plain, changed = (numbers(with_key(k, other_value(key), policy_loss=loss)) for k in (None, key))
        if (plain["loss"], plain["gradient"]) != (changed["loss"], changed["gradient"]):
            readers.add(name)
    assert readers == set(READ_BY[key])


@pytest.mark.parametrize("key", READ_BY)
def test_which_knobs_need_ratios_other_than_one(key: str) -> None:
    """Where the update takes its own log-probs as the old ones, these change no gradient, as the doctor says."""
    rows = experience(6, lengths=(8, 5, 7, 3, 6, 8, 2, 4)).replace(old_log_probs_BR=None)
    for name in (name for name in READ_BY[key] if not ROWS[name].selects):
        plain, changed = (
            numbers(with_key(k, other_value(key), policy_loss={"loss_mode": name}), rows) for k in (None, key)
        )
        same = changed["gradient"] == pytest.approx(plain["gradient"], rel=1e-9)
        equal_weights = key == "policy_loss.topr.ratio_level"  # then the level shows in ratios alone
        assert same is (key in ROWS[name].of_ratio or equal_weights), name


def test_every_knob_of_a_loss_has_a_row() -> None:
    loss = {f"policy_loss.{f.name}" for f in dataclasses.fields(PolicyLossConfig)} - {
        "policy_loss.loss_mode",
        "policy_loss.topr",
    }
    topr = {f"policy_loss.topr.{f.name}" for f in dataclasses.fields(ToprConfig)}
    assert loss | topr <= set(READ_BY)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_agg_mode_acts_where_the_table_says(name: str) -> None:
    """Equal rows would make two modes equal: these have different lengths."""
    values = {
        numbers(with_key("loss_agg_mode", mode, policy_loss={"loss_mode": name} | WIDE))["loss"]
        for mode in AGGREGATIONS.names()
    }
    assert len(values) == (1 if ROWS[name].aggregation else len(AGGREGATIONS.names()))


# key, value, settings in both runs -> metrics that may change besides loss and gradient
KL = {"use_kl_loss": True, "kl_loss_coef": 0.3}
SWITCHES = [
    ("entropy_coeff", 0.2, {}, set()),
    ("use_kl_loss", True, {"kl_loss_coef": 0.3}, {"kl_loss"}),
    ("kl_loss_coef", 0.7, KL, set()),
    ("kl_loss_type", "abs", KL, {"kl_loss"}),
    ("use_unbiased_kl", True, KL, {"kl_loss"}),
    ("rl_loss_coef", 0.5, KL, set()),
    ("sft_loss_coef", 0.5, {}, {"sft_loss"}),
    ("sample_weight", SampleWeightConfig(length=True), {}, {"pg_loss"}),
    ("sample_weight", SampleWeightConfig(difficulty=True), {}, {"pg_loss"}),
    ("ratio_skip_threshold", 1.1, KL, {"pg_loss", "kl_loss", "skip_ratio"}),
    ("loss_agg_mode", "seq-mean-token-sum", KL, {"pg_loss", "kl_loss"}),
    ("loss_scale_factor", 4.0, {"loss_agg_mode": "seq-mean-token-sum-norm"}, {"pg_loss"}),
]


@pytest.mark.parametrize(("key", "value", "common", "moved"), SWITCHES, ids=[f"{s[0]}={s[1]!s:.20}" for s in SWITCHES])
def test_a_switch_moves_its_numbers_and_only_those(key: str, value: Any, common: dict, moved: set[str]) -> None:
    before, after = numbers(ActorConfig(**common)), numbers(ActorConfig(**common | {key: value}))
    assert before["loss"] != after["loss"] and before["gradient"] != after["gradient"]
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed - {"loss", "gradient"} == moved


IDLE_SWITCHES = [
    {"kl_loss_coef": 0.9},
    {"kl_loss_type": "abs"},
    {"use_unbiased_kl": True},
    {"loss_scale_factor": 3.0},
    {"sample_weight": SampleWeightConfig(difficulty_key="hard")},
    {"sample_weight": SampleWeightConfig(scope="batch")},  # type: ignore[arg-type]
    {"ratio_skip_threshold": 1e6},
]


@pytest.mark.parametrize("keys", IDLE_SWITCHES, ids=str)
def test_what_is_off_changes_nothing(keys: dict[str, Any]) -> None:
    before, after = numbers(ActorConfig()), numbers(ActorConfig(**keys))
    after.pop("skip_ratio", None)
    assert before == after


def test_mask_truncated_equals_the_batch_without_those_rows() -> None:
    rows = number_rows(experience(6, lengths=(8, 5, 7, 3)))
    rows = rows.replace(truncated_B=torch.tensor([True, False, True, False]))
    outputs = outputs_for(rows, 7)
    alone = rows.select([1, 3])
    inputs = {name: value[[1, 3], : alone.response_mask_BR.shape[1]] for name, value in outputs.items()}
    loss, _ = PolicyObjective(ActorConfig())(inputs, alone, denominators_of(alone, MAX_RESPONSE_LENGTH))
    assert numbers(ActorConfig(mask_truncated=True), rows)["loss"] == pytest.approx(loss.item())
    assert numbers(ActorConfig(), rows)["loss"] != pytest.approx(loss.item())


# ---- hand values of the terms


def one_token_rows(**columns: Tensor) -> Experience:
    rows = experience(0, lengths=(1, 1), width=1, dtype=torch.float64)
    ones = torch.ones(2, 1, dtype=torch.float64)
    base = {"advantages_BR": ones, "old_log_probs_BR": -ones, "ref_log_probs_BR": -ones, "rollout_log_probs_BR": None}
    return rows.replace(**(base | columns))  # type: ignore[arg-type]


def run(actor: ActorConfig, rows: Experience, log_probs: list[float]) -> tuple[float, list[float], dict[str, float]]:
    leaf = torch.tensor(log_probs, dtype=torch.float64)[:, None].requires_grad_()
    outputs = {"log_probs": leaf, "entropy": torch.ones_like(leaf, requires_grad=True)}
    loss, metrics = PolicyObjective(actor)(outputs, rows, denominators_of(rows, MAX_RESPONSE_LENGTH))
    gradient = torch.autograd.grad(loss, leaf)[0].flatten().tolist()
    return loss.item(), gradient, {name: metric.value for name, metric in metrics.items()}


def test_imitation_term_by_hand() -> None:
    """Only the row with a score above 0, over both rows' tokens; the policy term is switched off."""
    rows = one_token_rows(score_B=torch.tensor([1.0, 0.0]))
    loss, gradient, metrics = run(ActorConfig(rl_loss_coef=0.0, sft_loss_coef=0.5), rows, [-2.0, -3.0])
    assert loss == pytest.approx(0.5 * 2.0 / 2) and gradient == pytest.approx([-0.25, 0.0])
    assert metrics["sft_loss"] == pytest.approx(1.0)
    moved = rows.replace(old_log_probs_BR=-5 * torch.ones(2, 1, dtype=torch.float64))
    assert run(ActorConfig(rl_loss_coef=0.0, sft_loss_coef=0.5), moved, [-2.0, -3.0])[0] == loss
    with pytest.raises(ValueError, match="sft_loss_coef needs the scores"):
        run(ActorConfig(sft_loss_coef=0.5), rows.replace(score_B=None), [-2.0, -3.0])


def test_unbiased_kl_by_hand() -> None:
    """Ratio 2, reference half as likely: 2 k3 with d = log 2; gradient rho k3 + rho (1 - e^-d) (both factors)."""
    rows = one_token_rows(advantages_BR=torch.zeros(2, 1, dtype=torch.float64))
    actor = ActorConfig(use_kl_loss=True, kl_loss_coef=1.0, use_unbiased_kl=True)
    _, gradient, metrics = run(actor, rows, [-1 + math.log(2), -1.0])
    k3 = 0.5 + math.log(2) - 1
    assert metrics["kl_loss"] == pytest.approx(2 * k3 / 2, rel=1e-5)
    assert gradient == pytest.approx([(2 * k3 + 2 * 0.5) / 2, 0.0])


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kl_has_the_exact_expectation_and_gradient(kind: str) -> None:
    """Summed over a vocabulary of four, weighted by the policy that sampled: KL(policy, reference) and its gradient."""
    logits = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, 0.4, -0.3, 0.2], dtype=torch.float64).log_softmax(0)
    ref = torch.tensor([0.1, 0.1, 0.0, 0.9], dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    exact = (log_probs.exp() * (log_probs - ref)).sum()
    rows = experience(0, lengths=(1,) * 4, width=1).replace(
        response_mask_BR=torch.ones(4, 1, dtype=torch.bool),
        old_log_probs_BR=old[:, None],
        ref_log_probs_BR=ref[:, None],
        rollout_log_probs_BR=None,
        advantages_BR=torch.zeros(4, 1, dtype=torch.float64),
        sample_weight_B=None,
    )
    for unbiased in (True, False):
        actor = ActorConfig(
            use_kl_loss=True, kl_loss_coef=1.0, use_unbiased_kl=unbiased, kl_loss_type=kind,
            loss_agg_mode="token-sum",
        )  # fmt: skip
        expectation = torch.zeros((), dtype=torch.float64)
        for token in range(4):
            outputs = {"log_probs": log_probs[token].view(1, 1), "entropy": torch.zeros(1, 1, dtype=torch.float64)}
            row = rows.select([token])
            loss, _ = PolicyObjective(actor)(outputs, row, denominators_of(row, 1))
            expectation = expectation + old[token].exp() * loss
        gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (expectation, exact)]
        agree = torch.allclose(expectation, exact) and torch.allclose(*gradients)
        assert agree is unbiased


def test_ratio_skip_by_hand() -> None:
    """Rows of ratio 3 and 1, threshold 2: the first adds nothing, and stays in the denominator."""
    rows = one_token_rows()
    loss, gradient, metrics = run(ActorConfig(ratio_skip_threshold=2.0), rows, [-1 + math.log(3), -1.0])
    assert loss == pytest.approx(-0.5) and gradient == pytest.approx([0.0, -0.5])
    assert metrics["skip_ratio"] == 0.5
    assert run(ActorConfig(ratio_skip_threshold=3.5), rows, [-1 + math.log(3), -1.0])[2]["skip_ratio"] == 0.0


def test_sample_weights_act_on_the_policy_loss_alone() -> None:
    rows = one_token_rows(sample_weight_B=torch.tensor([1.5, 0.5]), score_B=torch.ones(2))
    side = {"use_kl_loss": True, "kl_loss_type": "mse", "kl_loss_coef": 1.0, "sft_loss_coef": 1.0}
    _, gradient, metrics = run(ActorConfig(**side), rows, [-1.0, -1.0])
    assert metrics["pg_loss"] == pytest.approx(-1.0) and metrics["sft_loss"] == pytest.approx(1.0)
    assert gradient == pytest.approx([-0.75 - 0.5, -0.25 - 0.5])


def test_ppo_kl_is_reported_by_every_loss() -> None:
    for name in LOSSES:
        assert numbers(with_key(None, None, policy_loss={"loss_mode": name}))["ppo_kl"] != 0.0
