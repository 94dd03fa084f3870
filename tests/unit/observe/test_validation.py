from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.observe import factory
from verl_like.observe.validation import best_of, majority_of, subset_sizes, validation_metrics


def test_one_response_gives_mean_at_1_only() -> None:
    batch = factory.rollouts([[5], [6]], sources=["gsm8k", "gsm8k"])
    metrics = validation_metrics([(batch, factory.scores([1.0, 0.0]))])
    assert metrics == {
        "val-core/gsm8k/reward/mean@1": 0.5,
        "val-aux/gsm8k/failed_rewards": 0.0,
        "val-aux/gsm8k/num_prompts": 2.0,
    }


def test_acc_is_the_core_variable_if_the_reward_function_gives_it() -> None:
    batch = factory.rollouts([[5], [6]])
    metrics = validation_metrics([(batch, factory.scores([1.5, -0.5], [{"acc": True}, {"acc": False}]))])
    assert metrics["val-core/toy/acc/mean@1"] == 0.5
    assert metrics["val-aux/toy/reward/mean@1"] == 0.5
    assert [name for name in metrics if name.startswith("val-core/")] == ["val-core/toy/acc/mean@1"]


def test_acc_that_is_missing_in_some_rows_is_not_the_core_variable() -> None:
    batch = factory.rollouts([[5], [6]])
    metrics = validation_metrics([(batch, factory.scores([1.0, 0.0], [{"acc": True}, {}]))])
    assert metrics["val-core/toy/reward/mean@1"] == 0.5
    assert metrics["val-aux/toy/acc/mean@1"] == 1.0


def test_four_responses_by_hand() -> None:
    """Two prompts of four responses: 1 of 4 right, 4 of 4 right."""
    batch = factory.rollouts([[5]] * 8, groups=[0] * 4 + [1] * 4)
    preds = ["7", "7", "3", "3", "9", "9", "9", "9"]
    values = [0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    metrics = validation_metrics([(batch, factory.scores(values, [{"pred": p} for p in preds]))])
    core = {name.removeprefix("val-core/toy/reward/"): value for name, value in metrics.items() if "core" in name}
    # Majority of all four of prompt 0: "7" (value 0) ties with "3" (mean value 1/2): 0.25. Prompt 1: 1.
    assert core == {
        "mean@4": 0.625, "best@4/mean": 1.0, "best@4/std": 0.0, "maj@4/mean": 0.625, "maj@4/std": 0.0,
    }  # fmt: skip
    aux = {name.removeprefix("val-aux/toy/reward/"): value for name, value in metrics.items() if "aux" in name}
    assert aux["best@2/mean"] == pytest.approx((3 / 6 + 1) / 2)  # pairs that hold the right one: 3 of 6
    assert aux["pass@2"] == aux["best@2/mean"]
    assert aux["pass@1"] == 0.625
    assert aux["worst@2/mean"] == 0.5
    assert aux["std@4"] == pytest.approx(math.sqrt(3) / 4 / 2)
    assert aux["best@2/std"] == pytest.approx(0.25)


def test_pass_at_k_only_for_zero_or_one() -> None:
    batch = factory.rollouts([[5]] * 2, groups=[0, 0])
    metrics = validation_metrics([(batch, factory.scores([0.5, 1.0]))])
    assert not [name for name in metrics if "pass@" in name]
    assert metrics["val-core/toy/reward/best@2/mean"] == 1.0


def test_failed_rewards_are_left_out_and_counted() -> None:
    batch = factory.rollouts([[5]] * 5, groups=[0, 0, 1, 1, 2])
    metrics = validation_metrics([(batch, factory.scores([1.0, None, 0.0, 1.0, None]))])
    # Prompt 0 keeps one response, prompt 1 two, prompt 2 none: a failure is neither 0 nor 1.
    assert metrics["val-core/toy/reward/mean@2"] == pytest.approx((1.0 + 0.5) / 2)
    assert metrics["val-core/toy/reward/best@2/mean"] == 1.0  # prompt 1 alone
    assert metrics["val-aux/toy/failed_rewards"] == 2.0
    assert metrics["val-aux/toy/num_prompts"] == 3.0


def test_a_source_whose_rewards_all_failed_reports_the_count_and_no_score() -> None:
    metrics = validation_metrics([(factory.rollouts([[5]]), factory.scores([None]))])
    assert metrics == {"val-aux/toy/failed_rewards": 1.0, "val-aux/toy/num_prompts": 1.0}


def test_sources_and_batches_are_kept_apart() -> None:
    """Group 0 of the second batch is another prompt than group 0 of the first."""
    first = factory.rollouts([[5], [5]], groups=[0, 1], sources=["a", "b/c"])
    second = factory.rollouts([[5]], groups=[0], sources=["a"])
    metrics = validation_metrics([(first, factory.scores([1.0, 0.25])), (second, factory.scores([0.0]))])
    assert metrics["val-core/a/reward/mean@1"] == 0.5
    assert metrics["val-core/b/c/reward/mean@1"] == 0.25


def test_row_order_does_not_matter() -> None:
    batch = factory.rollouts([[5]] * 6, groups=[0, 0, 0, 1, 1, 1])
    scores = factory.scores([0.1, 0.7, 0.3, 1.0, 0.2, 0.9], [{"pred": p} for p in "aabcbc"])
    order = [5, 0, 3, 2, 4, 1]
    plain = validation_metrics([(batch, scores)])
    mixed = validation_metrics([(batch.select(order), scores.select(order))])
    assert mixed == pytest.approx(plain)


@given(values=st.lists(st.floats(-10, 10), min_size=1, max_size=7), data=st.data())
def test_best_of_equals_the_enumeration_of_all_subsets(values: list[float], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(values)))
    maxima = [max(subset) for subset in itertools.combinations(values, n)]
    mean, std = best_of(values, n)
    assert mean == pytest.approx(statistics.fmean(maxima), abs=1e-9)
    assert std == pytest.approx(statistics.pstdev(maxima), abs=1e-6)


@pytest.mark.parametrize(("num_responses", "num_correct", "k"), [(10, 3, 1), (10, 3, 5), (16, 0, 4), (8, 7, 4)])
def test_best_of_zero_one_values_is_the_unbiased_pass_at_k(num_responses: int, num_correct: int, k: int) -> None:
    values = [1.0] * num_correct + [0.0] * (num_responses - num_correct)
    expected = 1 - math.comb(num_responses - num_correct, k) / math.comb(num_responses, k)
    assert best_of(values, k)[0] == pytest.approx(expected)


def test_majority_by_hand() -> None:
    votes = [("a", 1.0), ("a", 1.0), ("b", 0.0)]
    assert majority_of(votes, 3) == (1.0, 0.0)
    # Pairs: aa -> 1, ab -> tie 0.5, ab -> tie 0.5
    assert majority_of(votes, 2)[0] == pytest.approx(2 / 3)
    assert majority_of(votes, 1)[0] == pytest.approx(2 / 3)


def test_majority_of_many_is_sampled_reproducibly_and_close() -> None:
    votes = [("right", 1.0)] * 18 + [(f"wrong {i}", 0.0) for i in range(14)]
    first, again = majority_of(votes, 16), majority_of(votes, 16)
    assert first == again
    assert first[0] > 0.99


def test_subset_sizes() -> None:
    assert [subset_sizes(n) for n in (2, 3, 8, 12)] == [[2], [2, 3], [2, 4, 8], [2, 4, 8, 12]]
