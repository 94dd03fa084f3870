from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.config.batch_plan import MicroBatchRule
from verl_like.parallel.balance import SharedRows, balance_ranks, micro_batches

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


@settings(max_examples=200, deadline=None)
@given(costs=st.lists(st.one_of(st.integers(1, 9), st.floats(0.1, 9)), max_size=60), ranks=st.integers(1, 9))
def test_balance_is_the_differencing_method_of_the_paper(costs: list[float], ranks: int) -> None:
    """Written down plainly, with the empty ranks: the same parts, ties included."""
    partial = [([0.0] * (ranks - 1) + [cost], [[] for _ in range(ranks - 1)] + [[i]]) for i, cost in enumerate(costs)]
    waiting = [(sums[-1], -i, sums, parts) for i, (sums, parts) in enumerate(partial)]
    order = len(costs)
    while len(waiting) > 1:
        waiting.sort(key=lambda each: each[:2], reverse=True)
        (_, _, sums, parts), (_, _, others, theirs) = waiting[:2]
        joined = [(s + t, x + y) for s, t, x, y in zip(sums, others[::-1], parts, theirs[::-1], strict=True)]
        joined.sort(key=lambda part: part[0])
        uneven = joined[-1][0] - joined[0][0]
        waiting[:2] = [(uneven, -order, [s for s, _ in joined], [rows for _, rows in joined])]
        order += 1
    expected = [sorted(rows) for rows in waiting[0][3]] if costs else [[] for _ in range(ranks)]
    assert balance_ranks(costs, ranks) == expected


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


def groups_with_prompts(number: list[int], prompts: list[int]) -> SharedRows:
    """Rows of one number, which are neighbours, have their prompt in common and nothing else."""
    common = [prompts[i] if i and number[i] == number[i - 1] else 0 for i in range(len(number))]
    return SharedRows(place=range(len(number)), common=common, number=number)


@st.composite
def grouped_rows(draw: st.DrawFn) -> tuple[list[int], SharedRows]:
    """Total tokens of rows in groups of up to eight, and their prompts."""
    tokens, numbers, prompts = [], [], []
    for group in range(draw(st.integers(1, 20))):
        prompt = draw(st.integers(1, 60))
        for response in draw(st.lists(st.integers(1, 200), min_size=1, max_size=8)):
            tokens.append(prompt + response)
            numbers.append(group)
            prompts.append(prompt)
    return tokens, groups_with_prompts(numbers, prompts)


@settings(max_examples=150, deadline=None)
@given(rows=grouped_rows(), budget=st.integers(1, 600))
def test_shared_prompts_keep_the_budget(rows: tuple[list[int], SharedRows], budget: int) -> None:
    tokens, prompts = rows
    rule = MicroBatchRule(max_tokens=budget)
    parts = micro_batches(tokens, rule, prompts)
    assert sorted(i for part in parts for i in part) == list(range(len(tokens)))
    for part in parts:
        assert len(part) == 1 or prompts.total(part, tokens) <= budget
    assert len(parts) <= len(micro_batches(tokens, rule))
    assert parts == micro_batches(tokens, rule, prompts)


def test_shared_prompts_fill_micro_batches() -> None:
    """64 prompts of 100 tokens with 8 responses of about 250: over 95% full, and little of a prompt comes twice."""
    draw = random.Random(0)
    responses = [min(512, max(1, int(draw.lognormvariate(5.4, 0.5)))) for _ in range(512)]
    tokens = [100 + n for n in responses]
    prompts = groups_with_prompts([i // 8 for i in range(512)], [100] * 512)
    once = prompts.total(range(512), tokens)
    assert once == 64 * 100 + sum(responses)
    parts = micro_batches(tokens, MicroBatchRule(max_tokens=4096), prompts)
    computed = [prompts.total(part, tokens) for part in parts]
    assert len(parts) <= math.ceil(once / 4096) + 1
    assert sum(computed) / (len(parts) * 4096) > 0.95 and min(computed) > 0.8 * 4096
    assert sum(computed) < 1.1 * once  # without shared prompts it would be 1.37 times


def test_deep_trees_are_cut_where_whole_rows_are_too_many() -> None:
    """100 turns of an agent fit into one budget, but attention reads 50 times as much."""
    tokens = [10 * (turn + 1) for turn in range(100)]
    turns = SharedRows(place=range(100), common=[0, *tokens[:-1]], number=[0] * 100)
    parts = micro_batches(tokens, MicroBatchRule(max_tokens=1001), turns)
    assert sorted(i for part in parts for i in part) == list(range(100))
    assert [part == list(range(part[0], part[-1] + 1)) for part in parts] == [True] * 4
    assert max(sum(tokens[i] for i in part) for part in parts) <= 16 * 1001


def test_a_long_prompt_is_not_repeated_to_fill_a_gap() -> None:
    """Two groups of 1,000 + 4 x 100 tokens: two micro-batches of 1,400, though 200 more would fit into each."""
    prompts = groups_with_prompts([0] * 4 + [1] * 4, [1000] * 8)
    parts = micro_batches([1100] * 8, MicroBatchRule(max_tokens=2600), prompts)
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_groups_stay_on_one_rank_where_that_is_balanced() -> None:
    prompts = groups_with_prompts([0, 0, 1, 1, 2, 2, 3, 3], [50] * 8)
    shares = balance_ranks([60.0, 70.0] * 4, 2, prompts)
    assert sorted({prompts.number[i] for i in share}.__len__() for share in shares) == [2, 2]
    one_group = groups_with_prompts([0] * 8, [10] * 8)
    assert [len(share) for share in balance_ranks([60.0] * 8, 4, one_group)] == [2, 2, 2, 2]  # cut for the balance


@settings(max_examples=100, deadline=None)
@given(rows=grouped_rows(), ranks=st.integers(1, 9))
def test_most_loaded_rank_has_no_more_to_do_than_without_groups(rows: tuple[list[int], SharedRows], ranks: int) -> None:
    tokens, prompts = rows
    costs = [float(n) for n in tokens]
    loads = [max(prompts.total(share, costs) for share in balance_ranks(costs, ranks, p)) for p in (prompts, None)]
    assert loads[0] <= loads[1] + 1e-6
