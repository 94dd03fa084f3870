"""Episodes as rows: what stands where."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from verl_like.batch import Prompt, PromptRow
from verl_like.episodes import partial_responses
from verl_like.episodes.episode import Episode, EpisodeFailure, Turn
from verl_like.episodes.rows import assemble_rollouts, episode_of_rows
from verl_like.rollout.rollout_engine import Partial, Sampled


def prompt(group: int, ids: list[int]) -> Prompt:
    return Prompt(ids=ids, row=PromptRow(index=group, data_source="t", messages=[]), group=group, position=group)


def turn(observed: list[int], ids: list[int], *, version: int = 5, **more: object) -> Turn:
    sampled = Sampled.of(ids, [-0.5 * i for i in ids], version)
    return Turn(observation_ids=observed, sampled=sampled, finish_reason="stop", **more)  # type: ignore[arg-type]


ONE, TWO = prompt(7, [1, 2]), prompt(9, [3])


def test_single_turns_are_rows_of_their_prompt() -> None:
    episodes = [[Episode(turns=(turn(p.ids, ids),)) for ids in answers] for p, answers in
                ((ONE, ([11, 12, 13], [14])), (TWO, ([15, 16], [17, 18])))]  # fmt: skip
    rollouts = assemble_rollouts([ONE, TWO], episodes)
    rollouts.check()
    assert rollouts.prompt_ids_BP.tolist() == [[1, 2], [1, 2], [0, 3], [0, 3]]
    assert rollouts.response_ids_BR.tolist() == [[11, 12, 13], [14, 0, 0], [15, 16, 0], [17, 18, 0]]
    assert rollouts.response_mask_BR.tolist() == [[True] * 3, [True, False, False], *[[True, True, False]] * 2]
    assert rollouts.group_B.tolist() == [7, 7, 9, 9]
    assert rollouts.rollout_log_probs_BR is not None and rollouts.rollout_log_probs_BR[1].tolist() == [-7.0, 0, 0]
    assert rollouts.weight_version_BR[0].tolist() == [5, 5, 5]
    assert rollouts.step_BR is None and rollouts.anchor_BR is None and rollouts.step_rewards_BR is None
    assert [row.index for row in rollouts.rows] == [7, 7, 9, 9]


def test_observations_between_turns_are_read_and_not_trained_on() -> None:
    three = Episode(
        turns=(
            turn([1, 2], [11, 12], state_id=40, reward=0.5, version=3),
            turn([21, 22], [13], state_id=41, reward=-1.0, version=4),
            turn([23], [14, 15], state_id=40, version=4),
        )
    )
    short = Episode(turns=(turn([1, 2], [16]),))
    rollouts = assemble_rollouts([ONE], [[three, short]])
    rollouts.check()
    assert rollouts.response_ids_BR.tolist() == [[11, 12, 21, 22, 13, 23, 14, 15], [16] + [0] * 7]
    assert rollouts.response_mask_BR[0].tolist() == [True, True, False, False, True, False, True, True]
    assert rollouts.response_length_B.tolist() == [8, 1]
    assert rollouts.step_BR is not None and rollouts.step_BR.tolist() == [[0, 0, -1, -1, 1, -1, 2, 2], [0] + [-1] * 7]
    assert rollouts.anchor_BR is not None and rollouts.anchor_BR[0].tolist() == [40, 40, -1, -1, 41, -1, 40, 40]
    assert rollouts.step_rewards_BR is not None
    assert rollouts.step_rewards_BR[0].tolist() == [0, 0.5, 0, 0, -1.0, 0, 0, 0]
    assert rollouts.rollout_log_probs_BR is not None
    assert rollouts.rollout_log_probs_BR[0].tolist() == [-5.5, -6, 0, 0, -6.5, 0, -7, -7.5]
    assert rollouts.weight_version_BR[0].tolist() == [3, 3, 0, 0, 4, 0, 4, 4]
    assert three.num_sampled == 5 and three.response_ids() == [11, 12, 21, 22, 13, 23, 14, 15]
    assert episode_of_rows([[three, short]]) == [0, 1]


def test_a_rewritten_context_begins_another_row_of_the_same_episode() -> None:
    cut = Episode(turns=(turn([1, 2], [11]), turn([9, 9, 9], [12, 13], new_row=True), turn([8], [14])))
    plain = Episode(turns=(turn([1, 2], [15]),))
    rollouts = assemble_rollouts([ONE, TWO], [[cut, plain], [Episode(turns=(turn([3], [16]),))]])
    rollouts.check()
    assert rollouts.prompt_ids_BP.tolist() == [[0, 1, 2], [9, 9, 9], [0, 1, 2], [0, 0, 3]]
    assert rollouts.response_ids_BR[1].tolist() == [12, 13, 8, 14]
    assert rollouts.group_B.tolist() == [7, 7, 7, 9]
    assert rollouts.episode_B is not None and rollouts.episode_B.tolist() == [14, 14, 15, 18]
    assert rollouts.step_BR is not None  # turns are counted in the whole episode
    assert rollouts.step_BR.tolist() == [[0, -1, -1, -1], [1, 1, -1, 2], [0, -1, -1, -1], [0, -1, -1, -1]]
    assert cut.response_ids() == [12, 13, 8, 14] and episode_of_rows([[cut, plain], [plain]]) == [0, 0, 1, 2]


def test_a_turn_without_a_token_is_a_row_all_the_same() -> None:
    assert assemble_rollouts([TWO], [[Episode(turns=(turn([3], []),))]]).response_ids_BR.shape == (1, 0)


def test_the_reward_of_a_turn_without_a_token_stands_on_the_last_one_before() -> None:
    spent = Episode(turns=(turn([3], [11, 12], reward=0.5), turn([21], [], reward=7.0)))
    rollouts = assemble_rollouts([TWO], [[spent]])
    rollouts.check()
    assert rollouts.step_rewards_BR is not None and rollouts.step_rewards_BR.tolist() == [[0, 7.5, 0]]
    with pytest.raises(ValueError, match="a turn has reward 1, but no token was sampled"):
        assemble_rollouts([TWO], [[Episode(turns=(turn([3], [], reward=1.0),))]])


@pytest.mark.parametrize("count", [1, 3])
def test_one_turn_says_nothing_of_turns_unless_it_has_something_to_say(count: int) -> None:
    marked = [Episode(turns=(turn([3], [1], state_id=2),))] * count
    rollouts = assemble_rollouts([TWO], [marked])
    assert rollouts.step_BR is not None and rollouts.step_rewards_BR is None


X = 255  # no engine noted the routes of the token


def routed(turn: Turn, *experts: int) -> Turn:
    routes = np.array(experts, dtype=np.uint8).reshape(-1, 1, 1)
    return dataclasses.replace(turn, sampled=dataclasses.replace(turn.sampled, routes=routes))


def test_routes_are_those_of_the_first_turn_that_saw_a_token() -> None:
    """Of prompt and response; the last token of a turn, and what was observed behind it, has those of the turn after.
    What no turn saw is unknown, and all of an episode that is lost."""
    first = routed(turn([1, 2], [7, 8]), 10, 11, 12)  # nothing was drawn from 8
    second = routed(turn([3], [9, 9]), 90, X, 92, 13, 14, 15)  # the engine computed the same tokens again
    trailing = Turn(observation_ids=[4, 4], sampled=Sampled.of([], [], 5), finish_reason="stop")
    rewritten = routed(turn([5, 5], [6], new_row=True), 20, 21)
    lost = Episode.lost(prompt(1, [1, 2]), EpisodeFailure(kind="x", message="y"))
    rows = assemble_rollouts(
        [prompt(0, [1, 2]), prompt(1, [1, 2])], [[Episode(turns=(first, second, trailing, rewritten))], [lost]]
    )
    assert rows.routes_T is not None and rows.routed_length_B is not None
    rows.check()
    found = [each.flatten().tolist() for each in rows.routes_T.split(rows.routed_length_B.tolist())]
    assert found == [[10, 11, 12, 13, 14, 15, X, X, X], [20, 21, X], [X, X]]
    assert assemble_rollouts([prompt(1, [1])], [[lost]]).routes_T is None


def test_a_checkpoint_keeps_routes_of_responses_under_way(tmp_path: Path) -> None:
    with_routes = routed(turn([1], [7, 8]), 10, 11).sampled
    without = turn([1], [7]).sampled
    partials = {3: {1: Partial.from_sampled(without), 0: Partial.from_sampled(with_routes, "stop")}}  # in any order
    partial_responses.write(tmp_path, partials)
    found = partial_responses.read(tmp_path)[3]
    assert np.array_equal(found[0].routes, with_routes.routes) and found[0].finish == "stop"  # type: ignore[arg-type]
    assert found[1].routes is None and found[1].token_ids.tolist() == [7]
    resumed = found[0] + routed(turn([], [9]), 50, 51, 52).sampled
    assert resumed.routes is not None and resumed.routes.flatten().tolist() == [10, 11, 52]
