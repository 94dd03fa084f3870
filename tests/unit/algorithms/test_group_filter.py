"""Which groups have a signal: hand values, a naive loop, edge cases."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.algorithms.builders import evaluated, rollouts, scores
from verl_like.algorithms.experience import make_experience
from verl_like.algorithms.reward_shaping import has_signal_B
from verl_like.batch import Rollouts, Scores
from verl_like.config import (
    ActorConfig,
    AlgorithmConfig,
    FilterGroupsConfig,
    OverlongBufferConfig,
    RewardModelConfig,
)

PLAIN = RewardModelConfig()


def signal(
    values: list[float],
    groups: list[int],
    *,
    batch: Rollouts | None = None,
    graded: Scores | None = None,
    model: RewardModelConfig = PLAIN,
    **rules: Any,
) -> list[bool]:
    batch = batch or rollouts((2,) * len(values), groups)
    config = FilterGroupsConfig(enable=True, **rules)
    return has_signal_B(config, model, batch, graded or scores(values), 8).tolist()


def test_groups_whose_scores_are_all_equal_are_dropped() -> None:
    assert signal([1.0, 0.0, 1.0, 1.0, 0.1, 0.1], [7, 7, 2, 2, 9, 9]) == [True, True, False, False, False, False]


def test_range_is_strict_and_takes_the_place_of_the_deviation() -> None:
    values, groups = [0.5, 0.5, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2, 3, 3]
    assert signal(values, groups, range=[0.0, 1.0]) == [True] * 4 + [False] * 4
    assert signal(values, groups, range=[0.5, 1.0]) == [False] * 8
    assert signal(values, groups, range=[0.0, 1.0], std_threshold=0.0) == [False, False, True, True] + [False] * 4


def test_threshold_of_the_deviation() -> None:
    values, groups = [0.0, 0.1, 0.0, 1.0], [0, 0, 1, 1]
    assert signal(values, groups, std_threshold=0.2) == [False, False, True, True]
    assert signal([0.5, 0.5], [0, 0], std_threshold=-1.0) == [True, True]  # ROLL's "keep everything"


def test_a_group_without_two_gradable_rows_has_no_signal() -> None:
    graded = scores([1.0, 0.0, 1.0, 0.0, 1.0], failed=(1,))
    batch = rollouts((2, 2, 2, 0, 2), [0, 0, 1, 1, 2])  # group 0: one failed; group 1: one empty; group 2: one row
    assert signal([], [], batch=batch, graded=graded, range=[-5, 5]) == [False] * 5
    three = scores([1.0, 0.0, 0.5], failed=(2,))
    assert signal([0, 0, 0], [4, 4, 4], graded=three) == [True] * 3  # the failed row stays with its group


def test_metric_of_the_reward_function_and_of_the_overlong_buffer() -> None:
    graded = scores([1.0, 1.0, 1.0, 1.0]).replace(extras=[{"acc": a} for a in (True, False, 1.0, 1)])
    assert signal([0] * 4, [0, 0, 1, 1], graded=graded, metric="acc") == [True, True, False, False]
    assert signal([0] * 4, [0, 0, 1, 1], graded=graded, metric="score") == [False] * 4
    long = rollouts((2, 8, 2, 3), [0, 0, 1, 1])
    model = RewardModelConfig(overlong_buffer=OverlongBufferConfig(enable=True, len=4, penalty_factor=1.0))
    for metric in ("seq_reward", "seq_final_reward"):
        assert signal([], [], batch=long, graded=graded, model=model, metric=metric) == [True, True, False, False]
    assert signal([0] * 4, [0, 0, 1, 1], graded=graded, metric="pred") == [False] * 4
    for bad in ({"acc": "yes"}, {"acc": None}, {"acc": math.nan}, {"acc": 1e308}, {}):  # of its row, not of the group
        mixed = scores([1.0] * 4).replace(extras=[{"acc": 1}, bad, {"acc": 0}, {"acc": 1}])
        assert signal([0] * 4, [0, 0, 0, 1], graded=mixed, metric="acc") == [True, True, True, False]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3)), min_size=1, max_size=12),
    bounds=st.sampled_from([None, [0.01, 0.99], [0.3, 0.7]]),
    threshold=st.sampled_from([None, 0.0, 0.4]),
)
def test_filter_equals_a_naive_loop(
    rows: list[tuple[float, int]], bounds: list[float] | None, threshold: float | None
) -> None:
    got = signal([v for v, _ in rows], [g for _, g in rows], range=bounds, std_threshold=threshold)
    for (_, group), passed in zip(rows, got, strict=True):
        mates = [v for v, g in rows if g == group]
        expected = len(mates) > 1
        if bounds:
            expected = expected and bounds[0] < statistics.fmean(mates) < bounds[1]
        if threshold is not None or not bounds:
            expected = expected and len(mates) > 1 and statistics.stdev(mates) > (threshold or 0.0)
        assert passed == expected


def test_masked_rows_stay_in_the_batch_and_train_nothing() -> None:
    """Colossal-RL's dynamic_batching=false: N_seq keeps them, N_tok does not; statistics still see them."""
    batch = rollouts((2, 3, 1, 4), [0, 0, 1, 1])
    graded = scores([1.0, 0.0, 1.0, 1.0]).replace(trained_B=torch.tensor([True, True, False, False]))
    algorithm = AlgorithmConfig(adv_estimator="reinforce")
    experience, metrics = make_experience(algorithm, ActorConfig(), batch, graded, evaluated(batch), 0.0)
    assert len(experience) == 4
    assert experience.response_mask_BR.sum(dim=1).tolist() == [2, 3, 0, 0]
    assert experience.response_length_B.tolist() == [2, 3, 1, 4]
    assert experience.advantages_BR[2:].abs().sum() == 0 and experience.advantages_BR[0].abs().sum() > 0
    assert metrics["critic/score/mean"] == 0.75 and metrics["training/rows_empty"] == 0.0
