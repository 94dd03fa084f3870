from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.algorithms.builders import evaluated, rollouts, scores
from verl_like.algorithms.experience import make_experience, place_on_last_token
from verl_like.batch import Evaluated, Rollouts, Scores
from verl_like.config import ActorConfig, AlgorithmConfig

GRPO = AlgorithmConfig(adv_estimator="grpo")
ACTOR = ActorConfig()


def test_score_goes_on_the_last_sampled_token() -> None:
    mask = torch.tensor([1, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0]).bool()  # third row: tool text between turns
    rewards = place_on_last_token(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask, torch.tensor([3, 2, 3, 3]))
    assert rewards.tolist() == [0, 0, 1, 2, 0, 0, 0, 3, 0, 0, 0]


def test_grpo_batch_by_hand() -> None:
    batch = rollouts((3, 1, 2, 2), [5, 5, 9, 9])
    experience, metrics = make_experience(GRPO, ACTOR, batch, scores([1.0, 0.0, 1.0, 1.0]), evaluated(batch), 0.0)
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    expected = [[half, half, half], [-half, 0.0, 0.0], [0.0] * 3, [0.0] * 3]
    assert torch.allclose(experience.advantages_BR, torch.tensor(expected))
    assert experience.returns_BR is None and experience.values_BR is None and experience.ref_log_probs_BR is None
    assert experience.old_log_probs_BR is not None
    assert experience.rollout_log_probs_BR is None  # compared with the old ones already
    assert metrics["critic/score/mean"] == 0.75
    assert (metrics["critic/score/max"], metrics["critic/score/min"]) == (1.0, 0.0)
    assert metrics["critic/rewards/mean"] == 0.75
    assert metrics["critic/advantages/max"] == pytest.approx(half)
    assert metrics["critic/advantages/mean"] == pytest.approx((3 * half - half) / 8)
    assert metrics["critic/group_zero_std_fraction"] == 0.5
    assert "critic/kl" not in metrics and "critic/values/mean" not in metrics


def test_kl_in_reward_by_hand() -> None:
    """old - ref = 0.5 on each token: row of 3 tokens loses 1.5 * coef, row of 1 loses 0.5 * coef."""
    algorithm = AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False, use_kl_in_reward=True)
    batch = rollouts((3, 1), [0, 0])
    experience, metrics = make_experience(algorithm, ACTOR, batch, scores([1.0, 0.0]), evaluated(batch, ref=True), 0.1)
    assert metrics["critic/kl"] == pytest.approx(0.5)
    assert metrics["critic/kl_coeff"] == 0.1
    rewards = [1.0 - 0.15, -0.05]
    assert metrics["critic/rewards/mean"] == pytest.approx(sum(rewards) / 2)
    assert metrics["critic/score/mean"] == 0.5
    assert experience.advantages_BR[0, 0].item() == pytest.approx((rewards[0] - rewards[1]) / 2)


def test_exact_kl_in_reward() -> None:
    """kl_penalty=full: the engine's own number per token, 0.25 on three tokens and 2 on one."""
    algorithm = AlgorithmConfig(adv_estimator="grpo", use_kl_in_reward=True, kl_penalty="full")
    batch = rollouts((3, 1), [0, 0])
    said = evaluated(batch)
    with pytest.raises(ValueError, match="kl_penalty=full"):
        make_experience(algorithm, ACTOR, batch, scores([1.0, 0.0]), said, 0.1)
    said = said.replace(full_kl_BR=torch.tensor([[0.25, 0.25, 0.25], [2.0, 9.0, 9.0]]))
    _, metrics = make_experience(algorithm, ACTOR, batch, scores([1.0, 0.0]), said, 0.1)
    assert metrics["critic/kl"] == pytest.approx((0.25 + 2.0) / 2)
    assert metrics["critic/rewards/mean"] == pytest.approx((1.0 - 0.075 - 0.2) / 2)


def test_gae_batch_by_hand() -> None:
    """Values 0.25, score on the last token, gamma = lam = 1: every return is the score."""
    algorithm = AlgorithmConfig(adv_estimator="gae")
    batch = rollouts((2, 1), [0, 1])
    experience, metrics = make_experience(
        algorithm, ACTOR, batch, scores([1.0, 0.0]), evaluated(batch, values=True), 0.0
    )
    assert experience.returns_BR is not None
    assert experience.returns_BR.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    raw = [0.75, 0.75, -0.25]
    mean = sum(raw) / 3
    std = math.sqrt(sum((x - mean) ** 2 for x in raw) / 2)
    got = experience.advantages_BR[experience.response_mask_BR].tolist()
    assert got == pytest.approx([(x - mean) / std for x in raw], rel=1e-5)
    assert metrics["critic/values/mean"] == 0.25
    assert metrics["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-4)
    assert metrics["critic/returns/mean"] == pytest.approx(2 / 3)


def test_rows_without_a_reward_leave_before_any_statistic() -> None:
    """A failed row is as if it had never been sampled; it is not a reward of 0."""
    batch = rollouts((3, 1, 2, 4), [0, 0, 0, 0])
    experience, metrics = make_experience(
        GRPO, ACTOR, batch, scores([1.0, 0.0, 1.0, 0.0], failed=(3,)), evaluated(batch), 0.0
    )
    without = batch.select([0, 1, 2])
    expected, _ = make_experience(GRPO, ACTOR, without, scores([1.0, 0.0, 1.0]), evaluated(without), 0.0)
    assert torch.equal(experience.advantages_BR, expected.advantages_BR)
    assert experience.response_ids_BR.shape == (3, 3)  # trimmed: the longest row has gone
    assert metrics["training/rows_without_reward"] == 1.0
    assert metrics["critic/score/mean"] == pytest.approx(2 / 3)


def test_rows_in_which_nothing_was_sampled_leave_too() -> None:
    batch = rollouts((2, 0, 1), [0, 0, 0])
    experience, metrics = make_experience(GRPO, ACTOR, batch, scores([1.0, 0.5, 0.0]), evaluated(batch), 0.0)
    assert len(experience) == 2 and experience.advantages_BR.isfinite().all()
    assert metrics["training/rows_empty"] == 1.0 and metrics["training/rows_without_reward"] == 0.0


def test_no_row_left_is_an_error_that_tells_why() -> None:
    batch = rollouts((2, 2), [0, 0])
    with pytest.raises(ValueError, match=r"none of the 2 responses.*2 without a reward.*exception.*boom"):
        make_experience(GRPO, ACTOR, batch, scores([0.0, 0.0], failed=(0, 1)), evaluated(batch), 0.0)


def test_detached_updates_carry_no_old_log_probs() -> None:
    batch = rollouts((2, 2), [0, 0])
    experience, _ = make_experience(GRPO, ACTOR, batch, scores([1.0, 0.0]), evaluated(batch, old=False), 0.0)
    assert experience.old_log_probs_BR is None


def test_reference_travels_only_when_the_loss_needs_it() -> None:
    batch = rollouts((2, 2), [0, 0])
    arguments = (batch, scores([1.0, 0.0]), evaluated(batch, ref=True))
    assert make_experience(GRPO, ACTOR, *arguments, 0.0)[0].ref_log_probs_BR is None
    assert make_experience(GRPO, ActorConfig(use_kl_loss=True), *arguments, 0.0)[0].ref_log_probs_BR is not None


def test_entropy_of_the_old_policy_is_reported_where_it_was_computed() -> None:
    batch = rollouts((2, 1), [0, 0])
    entropy = torch.tensor([[1.0, 2.0], [6.0, 99.0]])
    said = evaluated(batch).replace(entropy_BR=entropy)
    _, metrics = make_experience(GRPO, ACTOR, batch, scores([1.0, 0.0]), said, 0.0)
    assert metrics["actor/entropy"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("algorithm", "actor", "old", "message"),
    [
        (AlgorithmConfig(adv_estimator="grpo", use_kl_in_reward=True), ACTOR, True, "use_kl_in_reward=True needs ref"),
        (GRPO, ActorConfig(use_kl_loss=True), True, "use_kl_loss=True needs ref"),
        (AlgorithmConfig(adv_estimator="grpo", use_kl_in_reward=True), ACTOR, False, "old_log_probs=recompute"),
        (AlgorithmConfig(adv_estimator="gae"), ACTOR, True, "needs values"),
    ],
)
def test_what_is_missing_is_named(algorithm: AlgorithmConfig, actor: ActorConfig, old: bool, message: str) -> None:
    batch = rollouts((2, 2), [0, 0])
    with pytest.raises(ValueError, match=message):
        make_experience(algorithm, actor, batch, scores([1.0, 0.0]), evaluated(batch, old=old), 0.0)


def test_nan_log_probs_are_refused_with_their_rows() -> None:
    batch = rollouts((2, 2, 2), [0, 0, 0])
    said = evaluated(batch)
    assert said.old_log_probs_T is not None
    said.old_log_probs_T[5] = float("nan")
    with pytest.raises(ValueError, match=r"old_log_probs is NaN or infinite at 1 sampled tokens \(rows \[2\]"):
        make_experience(GRPO, ACTOR, batch, scores([1.0, 0.0, 0.0]), said, 0.0)


def test_a_valid_row_with_a_nan_score_is_refused() -> None:
    batch = rollouts((2, 2), [0, 0])
    with pytest.raises(ValueError, match="scores of valid rows must be finite"):
        make_experience(GRPO, ACTOR, batch, scores([1.0, float("nan")]), evaluated(batch), 0.0)


def test_inputs_are_not_changed() -> None:
    batch, said = rollouts((3, 1, 2, 2), [5, 5, 9, 9]), None
    said = evaluated(batch, ref=True, values=True)
    graded = scores([1.0, 0.0, 1.0, 1.0])
    before = [tensors(x) for x in (batch, said, graded)]
    algorithm = AlgorithmConfig(adv_estimator="gae", use_kl_in_reward=True)
    make_experience(algorithm, ActorConfig(use_kl_loss=True), batch, graded, said, 0.3)
    for copy, struct in zip(before, (batch, said, graded), strict=True):
        assert all(torch.equal(value, getattr(struct, name)) for name, value in copy.items())


def tensors(struct: Rollouts | Evaluated | Scores) -> dict[str, torch.Tensor]:
    return {n: v.clone() for n, v in struct.columns().items() if isinstance(v, torch.Tensor)}


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.floats(-2, 2, width=32)), min_size=1, max_size=10),
    estimator=st.sampled_from(["gae", "grpo"]),
    extra=st.integers(0, 3),
    seed=st.integers(0, 100),
)
def test_row_order_group_labels_and_padding_do_not_matter(
    rows: list[tuple[int, int, float]], estimator: str, extra: int, seed: int
) -> None:
    algorithm = AlgorithmConfig(adv_estimator=estimator, use_kl_in_reward=True, gamma=0.9, lam=0.8)
    lengths, groups, rewards = zip(*rows, strict=True)

    def credit(order: list[int], relabel: int, width: int) -> tuple[torch.Tensor, dict[str, float]]:
        batch = rollouts(tuple(lengths[i] for i in order), [groups[i] * relabel - 5 for i in order], width)
        said = evaluated(batch, ref=True, values=True)
        result, metrics = make_experience(algorithm, ACTOR, batch, scores([rewards[i] for i in order]), said, 0.2)
        return result.advantages_BR, metrics

    plain, plain_metrics = credit(list(range(len(rows))), 1, max(lengths))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    moved, moved_metrics = credit(order, -3, max(lengths) + extra)
    assert torch.allclose(moved, plain[order], atol=1e-4)
    assert moved_metrics == pytest.approx(plain_metrics, abs=1e-4)


def test_experience_is_frozen() -> None:
    batch = rollouts((2, 2), [0, 0])
    experience, _ = make_experience(GRPO, ACTOR, batch, scores([1.0, 0.0]), evaluated(batch), 0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        experience.group_B = torch.zeros(2)  # type: ignore[misc]
