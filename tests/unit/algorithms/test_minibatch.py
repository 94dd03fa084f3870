from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.algorithms.builders import experience
from verl_like.algorithms.minibatch import cut_minibatches, denominators_of

GROUPS = torch.tensor([40, 40, 7, 7, 7, 90, 7, 3])  # unequal sizes, one not contiguous, not sorted


def as_lists(minibatches: list[torch.Tensor]) -> list[list[int]]:
    return [index.tolist() for index in minibatches]


def test_groups_stay_whole_in_sampler_order() -> None:
    assert as_lists(cut_minibatches(GROUPS, prompts_per_mini_batch=2)) == [[0, 1, 2, 3, 4, 6], [5, 7]]
    assert as_lists(cut_minibatches(GROUPS, prompts_per_mini_batch=3)) == [[0, 1, 2, 3, 4, 6, 5], [7]]
    assert as_lists(cut_minibatches(GROUPS, prompts_per_mini_batch=100)) == [[0, 1, 2, 3, 4, 6, 5, 7]]


def test_by_number_the_last_takes_the_remainder() -> None:
    sizes = [len(x) for x in cut_minibatches(torch.arange(10), num_mini_batches=4)]
    assert sizes == [2, 2, 2, 4]
    assert len(cut_minibatches(torch.arange(2), num_mini_batches=4)) == 2


def test_nothing_to_cut() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    assert cut_minibatches(nothing, num_mini_batches=2) == []
    assert cut_minibatches(nothing, prompts_per_mini_batch=2) == []


def test_shuffle_depends_on_seed_and_epoch_only() -> None:
    groups = torch.arange(32) // 2

    def cut(seed: int, epoch: int) -> list[list[int]]:
        return as_lists(cut_minibatches(groups, prompts_per_mini_batch=4, shuffle=True, seed=seed, epoch=epoch))

    assert cut(1, 0) == cut(1, 0)
    assert cut(1, 0) != cut(1, 1) and cut(1, 0) != cut(2, 0)
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    cut(3, 3)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("arguments", [{}, {"num_mini_batches": 2, "prompts_per_mini_batch": 2}])
def test_exactly_one_size(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        cut_minibatches(GROUPS, **arguments)
    with pytest.raises(ValueError, match="must hold something"):
        cut_minibatches(GROUPS, prompts_per_mini_batch=0)


@settings(max_examples=80, deadline=None)
@given(
    groups=st.lists(st.integers(-5, 5), max_size=30),
    size=st.integers(1, 8),
    by_number=st.booleans(),
    shuffle=st.booleans(),
)
def test_every_row_once_and_groups_together(groups: list[int], size: int, by_number: bool, shuffle: bool) -> None:
    key = "num_mini_batches" if by_number else "prompts_per_mini_batch"
    cut = as_lists(cut_minibatches(torch.tensor(groups, dtype=torch.int64), shuffle=shuffle, **{key: size}))
    assert sorted(row for index in cut for row in index) == list(range(len(groups)))
    assert all(cut_index for cut_index in cut)
    places = [{groups[row] for row in index} for index in cut]
    assert sum(len(place) for place in places) == len(set(groups))  # no group in two mini-batches
    if not by_number:
        assert all(len(place) == size for place in places[:-1])
    else:
        assert len(cut) == min(size, len(set(groups)))


def test_denominators_count_the_whole_minibatch() -> None:
    rows = experience(0)
    counts = denominators_of(rows.select([4, 0]), 32)
    assert counts.num_tokens == int(rows.response_mask_BR[4].sum() + rows.response_mask_BR[0].sum())
    assert (counts.num_sequences, counts.max_response_length) == (2, 32)
    assert denominators_of(rows.select([]), 32).num_tokens == 0
