from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.config.batch_plan import MicroBatchRule
from verl_like.parallel.balance import balance_ranks, micro_batches

LENGTHS = st.lists(st.integers(1, 400), max_size=80)


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, budget=st.integers(1, 600))
def test_budget_is_never_exceeded_and_every_row_travels_once(lengths: list[int], budget: int) -> None:
    parts = micro_batches(lengths, MicroBatchRule(max_tokens=budget))
    assert sorted(i for rows in parts for i in rows) == list(range(len(lengths)))
    for rows in parts:
        assert len(rows) == 1 or sum(lengths[i] for i in rows) <= budget
    assert parts == micro_batches(lengths, MicroBatchRule(max_tokens=budget))


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=150))
def test_few_micro_batches_when_rows_are_small(lengths: list[int]) -> None:
    """Rows of at most a quarter of the budget: no more than the lower bound plus one."""
    parts = micro_batches(lengths, MicroBatchRule(max_tokens=400))
    assert len(parts) <= math.ceil(sum(lengths) / 400) + 1


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, most=st.integers(1, 20))
def test_count_rule(lengths: list[int], most: int) -> None:
    parts = micro_batches(lengths, MicroBatchRule(max_sequences=most))
    assert sorted(i for rows in parts for i in rows) == list(range(len(lengths)))
    assert len(parts) == math.ceil(len(lengths) / most) and all(0 < len(rows) <= most for rows in parts)


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(st.floats(0, 1e4), max_size=80), ranks=st.integers(1, 9))
def test_ranks_differ_by_no_more_than_one_row(costs: list[float], ranks: int) -> None:
    parts = balance_ranks(costs, ranks)
    assert len(parts) == ranks and sorted(i for rows in parts for i in rows) == list(range(len(costs)))
    totals = [sum(costs[i] for i in rows) for rows in parts]
    assert max(totals) - min(totals) <= max(costs, default=0.0) + 1e-6


def test_balance_by_hand() -> None:
    """8 7 6 5 4 in two: the differencing method gives 16 and 14, in three it gives 8, 11, 11."""
    totals = [sum((8, 7, 6, 5, 4)[i] for i in rows) for rows in balance_ranks([8, 7, 6, 5, 4], 2)]
    assert sorted(totals) == [14, 16]
    assert balance_ranks([3.0], 3).count([]) == 2


def test_micro_batches_are_even() -> None:
    parts = micro_batches([90, 80, 30, 20, 20, 10], MicroBatchRule(max_tokens=200))
    assert sorted(sum([90, 80, 30, 20, 20, 10][i] for i in rows) for rows in parts) == [120, 130]


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 ranks"):
        balance_ranks([1.0], 0)
