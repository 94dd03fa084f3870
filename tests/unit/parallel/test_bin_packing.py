"""Few bins: by hand, never over the capacity, never more than best fit, and fewer where best fit wastes."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.parallel.balance import best_fit_decreasing, best_subset, few_bins, fullest_bins, least

SIZES = st.lists(st.integers(1, 50), max_size=40)


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, capacity=st.integers(50, 120))
def test_every_size_is_in_one_bin_that_holds_it(sizes: list[int], capacity: int) -> None:
    for pack in (best_fit_decreasing, fullest_bins, few_bins):
        bins = pack(sizes, capacity)
        assert sorted(i for chosen in bins for i in chosen) == list(range(len(sizes)))
        assert all(0 < sum(sizes[i] for i in chosen) <= capacity for chosen in bins)
        assert bins == pack(sizes, capacity)
    assert least(sizes, capacity) <= len(few_bins(sizes, capacity)) <= len(best_fit_decreasing(sizes, capacity))


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), max_size=9), room=st.integers(0, 60))
def test_the_best_subset_is_the_best_of_all(sizes: list[int], room: int) -> None:
    chosen = best_subset(sizes, room)
    sums = [sum(part) for count in range(len(sizes) + 1) for part in itertools.combinations(sizes, count)]
    assert len(set(chosen)) == len(chosen)
    assert sum(sizes[i] for i in chosen) == max(total for total in sums if total <= room)


def test_early_sizes_are_preferred() -> None:
    assert best_subset([6, 4, 3, 2, 1], 6) == [0]
    assert best_subset([5, 4, 3, 3], 6) == [2, 3]


def test_where_best_fit_wastes_a_bin() -> None:
    """Of 180: 41 + 19, 39 + 13 + ..., 25 + ...; best fit puts 41 beside 19, 39 beside 13, and then 5 has no room."""
    sizes, capacity = [41, 39, 25, 19, 13, 13, 10, 9, 6, 5], 60
    assert len(best_fit_decreasing(sizes, capacity)) == 4
    assert sorted(sum(sizes[i] for i in chosen) for chosen in few_bins(sizes, capacity)) == [60, 60, 60]


def test_half_full_bins_become_fewer() -> None:
    draw = random.Random(0)
    sizes = [draw.randint(1200, 2400) for _ in range(300)]
    assert len(few_bins(sizes, 8192)) < len(best_fit_decreasing(sizes, 8192))


def test_nothing() -> None:
    assert few_bins([], 10) == [] and least([], 10) == 0
