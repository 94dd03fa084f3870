"""The book: what is trained when, for groups that live through several versions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_like.batch import Prompt, PromptRow, Rollouts
from verl_like.config.ppo import AsyncTrainingConfig
from verl_like.episodes.episode import Episode, Turn
from verl_like.episodes.rows import assemble_rollouts
from verl_like.episodes.staleness import Book, Room, staleness_metrics
from verl_like.rollout.rollout_engine import Sampled


def sampled_by(*versions: list[int]) -> Rollouts:
    """A response for each list: the versions of its tokens. Prompts have four tokens."""
    prompts, episodes = [], []
    for group, of_tokens in enumerate(versions):
        count = len(of_tokens)
        sampled = Sampled.of([7] * count, [-1.0] * count, of_tokens)
        turn = Turn(observation_ids=[1, 2, 3, 4], sampled=sampled, finish_reason="stop")
        prompts.append(
            Prompt(
                ids=[1, 2, 3, 4], row=PromptRow(index=group, data_source="d", messages=[]), group=group, position=group
            )
        )
        episodes.append([Episode(turns=(turn,))])
    return assemble_rollouts(prompts, episodes)


def book(*begun: int, wanted: int = 2, bound: int = 1, waits: bool = True) -> Book:
    made = Book(wanted, bound, waits=waits)
    for group, version in enumerate(begun):
        made.begin(group, version)
    return made


def test_a_batch_is_the_oldest_groups_that_have_ended_in_the_order_of_their_draws() -> None:
    made = book(0, 0, 1, 1, bound=3)
    for group in (3, 2, 1):
        made.end(group)
    assert made.batch(1) == [1, 2]  # 1 is older; 2 before 3
    made.end(0)
    assert made.batch(1) == [0, 1]


def test_nothing_is_begun_while_a_whole_batch_waits() -> None:
    made = Book(2, 3, waits=True, room=Room(groups=10, responses=100))
    for group in range(3):
        made.begin(group)
    made.end(0)
    assert made.admits() == 7
    made.end(1)
    assert made.admits() == 0
    made.train([0, 1])
    made.trained()
    assert made.admits() == 9


def test_a_step_waits_for_what_would_be_too_old_for_the_next_one() -> None:
    made = book(0, 0, 1, 1)
    made.end(2)
    made.end(3)
    assert made.batch(0) is not None  # at version 1 the others are one version old
    assert made.batch(1) is None  # at version 2 they would be two
    made.end(0)
    assert made.batch(1) is None
    made.end(1)
    assert made.batch(1) == [0, 1]


def test_a_step_waits_where_later_ones_could_not_train_all_in_time() -> None:
    made = book(0, 0, 0, 0, 1, 1, wanted=2, bound=2)
    made.end(4)
    made.end(5)
    assert made.batch(1) is None  # four groups are due within one further step of two
    made.end(0)
    assert made.batch(1) is None  # three
    made.end(1)
    assert made.batch(1) == [0, 1]


def test_without_waiting_age_is_no_reason() -> None:
    made = book(0, 0, 5, 5, waits=False)
    made.end(2)
    made.end(3)
    assert made.batch(5) == [2, 3] and made.too_old(5) == [0, 1] and made.too_old(1) == []


def test_groups_that_a_shorter_bound_made_late_are_no_deadlock() -> None:
    made = book(0, 0, 0, 0, 0)
    for group in range(5):
        assert made.batch(9) is None
        made.end(group)
    assert made.batch(9) == [0, 1]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.floats(0.1, 5), st.lists(st.integers(1, 60), min_size=80, max_size=80))
def test_no_group_is_ever_too_old_and_all_are_trained(wanted: int, bound: int, rate: float, lengths: list[int]) -> None:
    """Groups end after any time; a step begins with as many as the keys allow, and each advances the version."""
    most = AsyncTrainingConfig(over_sample_rate=rate, max_staleness=bound).groups_under_way(wanted)
    made, due, drawn, trained, now = Book(wanted, bound, waits=True), dict[int, int](), 0, [], 0
    for version in range(len(lengths) // wanted):
        while len(made) < most and drawn < len(lengths):
            made.begin(drawn, version)
            due[drawn], drawn = now + lengths[drawn], drawn + 1
        born = dict(made.running | made.ended)
        while (batch := made.batch(version)) is None:
            now += 1
            for group in [group for group in made.running if due[group] <= now]:
                made.end(group)
        for group in batch:
            assert version - born[group] <= bound
            made.forget(group)
        trained += batch
    assert len(set(trained)) == len(trained)  # none twice, and none is lost
    assert {*trained, *made.running, *made.ended} == set(range(drawn))


def test_how_old_the_tokens_of_a_batch_are() -> None:
    rollouts = sampled_by([1, 1, 2], [2, 2])
    assert staleness_metrics(rollouts, 3) == {
        "staleness/mean": pytest.approx((2 + 2 + 1 + 1 + 1) / 5),
        "staleness/max": 2.0,
        "staleness/share_1": 0.6,
        "staleness/share_2": 0.4,
        "async/mixed_fraction": 0.5,
        "async/reprefill_tokens": 6.0,  # the prompt of four and two tokens of the first
    }
    masked = rollouts.replace(response_mask_T=torch.zeros_like(rollouts.response_mask_T))
    assert staleness_metrics(masked, 3) == {}
