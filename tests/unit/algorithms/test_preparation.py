"""Row weights, truncated rows and selections of a mini-batch: hand values, scopes, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.unit.algorithms.builders import evaluated, experience, rollouts, scores
from verl_like.algorithms.completeness import complete
from verl_like.algorithms.experience import make_experience
from verl_like.algorithms.preparation import difficulties, prepare_batch, prepare_minibatch, sample_weights
from verl_like.batch import Experience, PromptRow
from verl_like.config import ActorConfig, AlgorithmConfig, PolicyLossConfig, SampleWeightConfig

BOTH = SampleWeightConfig(difficulty=True, length=True)


def rows_of_lengths(*lengths: int) -> Experience:
    rows = experience(0, lengths=lengths, width=max(lengths))
    inside = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    return rows.replace(response_mask_BR=inside)


def test_length_weights_by_hand() -> None:
    """Longest 0.5, shortest 1.5, one in the middle 1.0: their mean is 1 already."""
    weights = sample_weights(rows_of_lengths(2, 4, 6), SampleWeightConfig(length=True))
    assert weights is not None and weights.tolist() == pytest.approx([1.5, 1.0, 0.5])


def test_difficulty_weights_by_hand() -> None:
    rows = rows_of_lengths(2, 2, 2).replace(difficulty_B=torch.tensor([-1.0, 0.5, 7.0]))
    weights = sample_weights(rows, SampleWeightConfig(difficulty=True))
    raw = [0.5, 1.25, 2.0]
    assert weights is not None and weights.tolist() == pytest.approx([3 * w / sum(raw) for w in raw])


def test_both_multiply_and_have_mean_one() -> None:
    rows = rows_of_lengths(1, 3).replace(difficulty_B=torch.tensor([0.0, 1.0]))
    weights = sample_weights(rows, BOTH)
    raw = [1.5 * 0.5, 0.5 * 2.0]
    assert weights is not None and weights.tolist() == pytest.approx([2 * w / sum(raw) for w in raw])


def test_equal_lengths_and_single_rows_weigh_one() -> None:
    for rows in (rows_of_lengths(3, 3, 3), rows_of_lengths(4)):
        weights = sample_weights(rows, SampleWeightConfig(length=True))
        assert weights is not None and weights.tolist() == pytest.approx([1.0] * len(rows))
    assert sample_weights(rows_of_lengths(3), SampleWeightConfig()) is None


def test_difficulties_are_read_from_the_dataset_row() -> None:
    batch = rollouts((1, 2), [0, 1])
    named = [
        PromptRow(index=i, data_source="toy", messages=[], extra_info={"hard": value})
        for i, value in enumerate((0.25, 1))
    ]
    options = SampleWeightConfig(difficulty=True, difficulty_key="hard")
    values = difficulties(batch.replace(rows=named), options)
    assert values is not None and values.tolist() == [0.25, 1.0]
    assert difficulties(batch, SampleWeightConfig()) is None


@pytest.mark.parametrize("value", [None, "easy", [0.5], float("nan"), 2**400, -math.inf])
def test_a_row_without_a_difficulty_is_named(value: object) -> None:
    infos: list[dict[str, Any]] = [{"difficulty": 0.5}, {"difficulty": value}, {}, {"difficulty": 1}]
    rows = [PromptRow(index=7, data_source="toy", messages=[], extra_info=info) for info in infos]
    actor = ActorConfig(sample_weight=SampleWeightConfig(difficulty=True))
    batch = rollouts((1, 1, 1, 1), [0] * 4).replace(rows=rows)
    found = complete(scores([1.0, 0.0, 0.0, 0.0]), rows, AlgorithmConfig(), actor=actor)
    assert found.valid_B.tolist() == [True, False, False, True]
    assert [failure.message for failure in found.failures if failure is not None] == [
        f"actor_rollout_ref.actor.sample_weight.difficulty_key=difficulty: the row {what}"
        for what in (f"has {value!r}, which is no finite number", "has a score alone, and no 'difficulty'")
    ]
    trained, metrics = make_experience(
        AlgorithmConfig(adv_estimator="grpo"), actor, batch, found, evaluated(batch), 0.0
    )
    assert trained.difficulty_B is not None and trained.difficulty_B.tolist() == [0.5, 1.0]
    assert metrics["training/rows_without_reward"] == 2.0


def test_scope_says_over_which_rows_weights_are_normalised() -> None:
    rows = rows_of_lengths(2, 4, 6, 8)
    small = ActorConfig(sample_weight=SampleWeightConfig(length=True))
    large = ActorConfig(sample_weight=SampleWeightConfig(length=True, scope="batch"))  # type: ignore[arg-type]
    first = prepare_minibatch(prepare_batch(rows, small).select([0, 1]), small, (0,))
    assert first.sample_weight_B is not None and first.sample_weight_B.tolist() == pytest.approx([1.5, 0.5])
    first = prepare_minibatch(prepare_batch(rows, large).select([0, 1]), large, (0,))
    assert first.sample_weight_B is not None and first.sample_weight_B.tolist() == pytest.approx([1.5, 7 / 6])


def test_truncated_rows_leave_the_minibatch_and_the_weights() -> None:
    rows = rows_of_lengths(2, 4, 6, 8).replace(truncated_B=torch.tensor([False, False, False, True]))
    for scope in ("mini_batch", "batch"):
        weight = SampleWeightConfig(length=True, scope=scope)  # type: ignore[arg-type]
        actor = ActorConfig(mask_truncated=True, sample_weight=weight)
        kept = prepare_minibatch(prepare_batch(rows, actor), actor, (0,))
        assert kept.response_length_B.tolist() == [2, 4, 6]
        assert kept.sample_weight_B is not None and kept.sample_weight_B.tolist() == pytest.approx([1.5, 1.0, 0.5])
    assert len(prepare_minibatch(rows, ActorConfig(), (0,))) == 4


def test_all_rows_truncated_leaves_an_empty_minibatch() -> None:
    rows = rows_of_lengths(2, 4).replace(truncated_B=torch.ones(2, dtype=torch.bool))
    for mode in ("vanilla", "kl_cov", "clip_cov"):
        actor = ActorConfig(mask_truncated=True, sample_weight=BOTH, policy_loss=PolicyLossConfig(loss_mode=mode))
        assert len(prepare_minibatch(prepare_batch(rows, actor), actor, (0,))) == 0


def test_missing_columns_are_named() -> None:
    rows = rows_of_lengths(2, 4).replace(truncated_B=None, difficulty_B=None)
    with pytest.raises(ValueError, match="mask_truncated=True needs finish reasons"):
        prepare_minibatch(rows, ActorConfig(mask_truncated=True), (0,))
    with pytest.raises(ValueError, match="needs difficulties"):
        prepare_minibatch(rows, ActorConfig(sample_weight=BOTH), (0,))
