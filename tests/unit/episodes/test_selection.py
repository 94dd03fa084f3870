"""Which groups make up a batch, whatever ends when."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_like.data.sampler import ResumableSampler
from verl_like.episodes.selection import CompletionOrder, DrawOrder, Limits, Selection


def play(selection: Selection, keeps: list[bool], seed: int, overdue: frozenset[int] = frozenset()) -> list[int]:
    """Start what is admitted, judge at random; the groups in the order of their ends."""
    rng, running, ended, started = random.Random(seed), list[int](), list[int](), 0
    while not selection.complete() and not selection.exhausted():
        for _ in range(selection.admits()):
            selection.begin(started, overdue=started in overdue)
            running.append(started)
            started += 1
        assert 0 < len(running) <= selection.limits.in_flight and started <= selection.limits.most
        group = running.pop(rng.randrange(len(running)))
        selection.end(group, kept=keeps[group])
        ended.append(group)
    return ended


verdicts = st.lists(st.booleans(), min_size=60, max_size=60)
sizes = st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 3), st.floats(0.1, 1))


@given(verdicts, sizes, st.integers(0, 2**32))
def test_the_first_kept_groups_in_draw_order_whatever_ends_when(
    keeps: list[bool], size: tuple[int, int, int, float], seed: int
) -> None:
    wanted, more, extra, expected = size
    limits = Limits(wanted=wanted, in_flight=wanted + more, most=60, extra=extra, expected=expected)
    selection = DrawOrder(limits)
    ended = play(selection, keeps, seed)
    first = [group for group, kept in enumerate(keeps) if kept][:wanted]
    assert selection.complete() == (len(first) == wanted) != selection.exhausted()
    if selection.complete():
        assert selection.chosen() == first
        assert selection.dropped() == [group for group in range(first[-1]) if not keeps[group]]
    else:
        assert len(ended) == 60


@given(verdicts, sizes, st.integers(0, 2**32))
def test_completion_order_takes_the_fastest_but_waits_for_the_overdue(
    keeps: list[bool], size: tuple[int, int, int, float], seed: int
) -> None:
    wanted, more, extra, expected = size
    overdue = frozenset(range(min(wanted, extra)))
    limits = Limits(wanted=wanted, in_flight=wanted + more, most=60, extra=extra, expected=expected)
    selection = CompletionOrder(limits)
    ended = play(selection, keeps, seed, overdue)
    if selection.complete():
        assert overdue <= set(ended)
        late = [group for group in ended if group in overdue and keeps[group]]
        rest = [group for group in ended if group not in overdue and keeps[group]]
        assert selection.chosen() == [*late, *rest][:wanted]
        assert selection.dropped() == [group for group in ended if not keeps[group]]


@pytest.mark.parametrize(("wanted", "draw"), [(4, 6), (4, 8), (8, 12), (16, 24)])
def test_the_batches_of_a_run_do_not_depend_on_what_ends_when(wanted: int, draw: int) -> None:
    """Also when prompts that were given back wait behind others for more than one step."""

    def batches(seed: int) -> list[list[int]]:
        sampler, rng, found = ResumableSampler(500, shuffle=True, seed=1), random.Random(seed), []
        for _ in range(30):
            selection = DrawOrder(Limits(wanted=wanted, in_flight=draw, most=10**6, expected=wanted / draw))
            begun: dict[int, int] = {}
            running: list[int] = []
            while not selection.complete():
                if count := selection.admits():
                    for row, number in zip(*sampler.draw(count, drop_last=False), strict=True):
                        selection.begin(number)
                        begun[number] = row
                        running.append(number)
                group = running.pop(-1 if rng.random() < 0.8 else 0)
                selection.end(group, kept=begun[group] % 3 == 0)
            used = {*selection.chosen(), *selection.dropped()}
            sampler.give_back([(row, number) for number, row in begun.items() if number not in used])
            found.append([begun[number] for number in selection.chosen()])
        return found

    assert all(batches(seed) == batches(0) for seed in range(1, 12))


def test_as_many_groups_are_started_as_are_expected_to_fill_the_batch() -> None:
    selection = DrawOrder(Limits(wanted=8, in_flight=64, most=1000, expected=0.5))
    assert selection.admits() == 16
    for group in range(16):
        selection.begin(group)
    assert selection.admits() == 0
    for group in range(12):
        selection.end(group, kept=False)
    # 8 are missing, (0 + 8 x 0.5) of (12 + 8) are expected: 40 must run, of which 4 do
    assert selection.admits() == 36


def test_nothing_is_started_for_a_batch_that_only_waits() -> None:
    selection = DrawOrder(Limits(wanted=1, in_flight=4, most=100, extra=3))
    for group in range(selection.admits()):
        selection.begin(group)
    selection.end(1, kept=True)
    assert selection.admits() == 0 and not selection.complete()
    selection.end(0, kept=False)
    assert selection.complete() and selection.chosen() == [1] and selection.dropped() == [0]


def test_a_batch_that_cannot_be_in_flight_is_refused() -> None:
    with pytest.raises(ValueError, match="in_flight=3 groups cannot fill a batch of 4"):
        Limits(wanted=4, in_flight=3, most=9)
