"""From what a loop returned to turns: what is proved to be sampled, cut, masked and counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from verl_like.episodes.episode import Turn
from verl_like.plugins.verl_agents.messages import LoopRow
from verl_like.plugins.verl_agents.turns import Record, turns_of
from verl_like.rollout.rollout_engine import Completion, Sampled


def row(prompt: str, response: str, mask: str, **fields: Any) -> LoopRow:
    ids = [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in (prompt, response)]
    trained = np.array([bit == "1" for bit in mask])
    return LoopRow(prompt_ids_P=ids[0], response_ids_R=ids[1], mask_R=trained, **fields)


def record(*pairs: tuple[str, str]) -> Record:
    """Log-probs tell which completion a token is from, and which token of it."""
    return [
        (
            list(context.encode()),
            Completion(
                request_id=str(number),
                sampled=Sampled.of(list(text.encode()), [-number - k / 10 for k in range(len(text))], number),
                finish_reason="stop",
            ),
        )
        for number, (context, text) in enumerate(pairs, start=1)
    ]


def shown(turns: list[Turn]) -> list[tuple[str, str]]:
    return [(bytes(turn.observation_ids).decode(), bytes(turn.sampled.token_ids.tolist()).decode()) for turn in turns]


def cut(rows: list[LoopRow], made: Record, **options: Any) -> tuple[list[Turn], Any]:
    return turns_of(rows, made, **{"response": 100, "total": 200, **options})


def test_turns_alternate_with_what_the_loop_wrote() -> None:
    turns, counts = cut([row("Q", "abXcdY", "110110")], record(("Q", "ab"), ("QabX", "cd")))
    assert shown(turns) == [("Q", "ab"), ("X", "cd")] and not counts["unsampled_tokens"]
    assert [turn.new_row for turn in turns] == [True, False] and turns[1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("response", "mask", "made", "calls"),
    [
        ("ab", "11", [("Q", "ab")], 0),
        ("abXcdY", "110110", [("Q", "ab"), ("QabX", "cd")], 1),
        ("abXcdYef", "11011011", [("Q", "ab"), ("QabX", "cd"), ("QabXcdY", "ef")], 2),
        ("abcd", "1111", [("Q", "ab"), ("Qab", "cd")], 0),  # asked to go on
        ("abcd", "1011", [("Q", "abcd")], 0),  # a hole in the mask
    ],
)
def test_what_the_loop_put_between_answers_counts_as_calls(
    response: str, mask: str, made: list[tuple[str, str]], calls: int
) -> None:
    _, counts = cut([row("Q", response, mask)] * 2, record(*made))
    assert counts["calls"] == 2 * calls


def test_log_probs_are_those_of_the_completion_that_the_row_holds() -> None:
    """Two samples of one context, as of best-of-n: the row has the second, which begins as the first does."""
    (turn,), _ = cut([row("Q", "abc", "111")], record(("Q", "abx"), ("Q", "abc")))
    np.testing.assert_allclose(turn.sampled.log_probs, [-2.0, -2.1, -2.2], rtol=1e-6)
    assert turn.sampled.weight_versions.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("response", "mask", "expected", "unsampled"),
    [
        ("ab+", "111", [("Q", "ab")], 1),  # words put into its mouth
        ("aB", "11", [("Q", "a")], 1),  # one token was changed
        ("abXcd", "11011", [("Q", "ab")], 2),  # nothing was sampled after this context
        ("abcd", "1111", [("Q", "ab")], 2),  # these words were, but after another one
        ("abX", "010", [("Qa", "b")], 0),  # what was sampled, but shall not be trained
    ],
)
def test_only_what_is_proved_is_trained_on(
    response: str, mask: str, expected: list[tuple[str, str]], unsampled: int
) -> None:
    turns, counts = cut([row("Q", response, mask)], record(("Q", "ab"), ("Rab", "cd")))
    assert shown(turns) == expected and counts["unsampled_tokens"] == unsampled


def test_a_row_is_cut_at_its_budget() -> None:
    turns, counts = cut([row("Q", "abXcd", "11011")], record(("Q", "ab"), ("QabX", "cd")), response=4)
    assert shown(turns) == [("Q", "ab"), ("X", "c")] and counts["cut_tokens"] == 1
    assert [turn.finish_reason for turn in turns] == ["stop", "length"]
    with pytest.raises(ValueError, match=r"has 3 prompt_ids; .* = 3"):
        cut([row("QRS", "a", "1")], record(("QRS", "a")), total=3)


def test_scores_of_turns() -> None:
    made, scores = record(("Q", "ab"), ("QabX", "cd")), {"turn_scores": [0.5]}
    turns, _ = cut([row("Q", "abXcd", "11011", extra=scores)], made, turn_rewards=True)
    assert [turn.reward for turn in turns] == [0.5, None]
    for bad in ([1, 2, 3], 0.5, ["much"]):
        with pytest.raises(ValueError, match=r"turn_scores|must be a finite number"):
            cut([row("Q", "abXcd", "11011", extra={"turn_scores": bad})], made, turn_rewards=True)


def test_nothing_that_was_sampled() -> None:
    with pytest.raises(ValueError, match="no token of what the loop returned was sampled"):
        cut([row("Q", "xy", "11")], record(("Q", "ab")))


def rewards(made: LoopRow, sampled: Record, **options: Any) -> list[tuple[str, float | None]]:
    turns, _ = cut([made], sampled, turn_rewards=True, **options)
    return [(said, turn.reward) for (_, said), turn in zip(shown(turns), turns, strict=True)]


def test_scores_are_those_of_completions_however_the_mask_cuts_them() -> None:
    sampled = record(("Q", "abc"), ("QabcX", "de"))
    whole = row("Q", "abcXde", "101011", extra={"turn_scores": [0.0, 1.0]})
    assert rewards(whole, sampled) == [("a", None), ("c", 0.0), ("de", 1.0)]
    assert rewards(row("Q", "abcXde", "111011", extra={"turn_scores": [0.5]}), sampled) == [("abc", 0.5), ("de", None)]


def test_scores_beside_tokens_that_were_not_sampled_are_not_shifted() -> None:
    rewritten = row("Q", "aBcXde", "111011", extra={"turn_scores": [1.0, 0.0]})
    with pytest.raises(ValueError, match="tokens that were not sampled there"):
        rewards(rewritten, record(("Q", "abc"), ("QaBcX", "de")))


def test_a_row_that_outgrows_the_budget_is_truncated_and_keeps_its_scores() -> None:
    sampled = record(("Q", "abc"), ("QabcX", "de"))
    long = row("Q", "abcXde", "111011", extra={"turn_scores": [1.0, 2.0]})
    assert rewards(long, sampled, response=4) == [("abc", 1.0)]
    turns, counts = cut([long], sampled, response=4)
    assert turns[-1].finish_reason == "length" and counts["cut_tokens"] == 2


def test_an_answer_for_which_there_was_no_room_truncates() -> None:
    sampled = record(("Q", "abc"), ("QabcX", ""))
    empty = Completion(request_id="x", sampled=Sampled.of([], [], 0), finish_reason="length")
    turns, _ = cut([row("Q", "abcX", "1110")], [sampled[0], (list(b"QabcX"), empty)])
    assert [turn.finish_reason for turn in turns] == ["length"]
