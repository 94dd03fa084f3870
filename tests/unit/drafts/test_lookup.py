"""What is guessed: what followed the last tokens before, as far as that was right before and pays."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from verl_like.config.rollout import SpeculativeConfig
from verl_like.plugins.drafts.history import FILE, History
from verl_like.plugins.drafts.lookup import Lookup, Texts
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, Sampled, SamplingParams
from verl_like.rollout.rows import Row


def row(name: str, prompt: list[int], **fields: object) -> Row:
    sampling = SamplingParams(max_tokens=2_000)
    request = GenerationRequest(request_id=name, prompt_ids=prompt, sampling=sampling, **fields)  # pyright: ignore
    return Row(request, seed=1)


def response(tokens: list[int], drafted: int = 0, kept: int = 0) -> Completion:
    sampled = Sampled.of(tokens, [0.0] * len(tokens), 1)
    return Completion(request_id="r", sampled=sampled, finish_reason="stop", drafted=drafted, kept=kept)


def drive(lookup: Lookup, rows: list[Row], futures: list[list[int]]) -> tuple[int, int, int]:
    """Let each row sample its future; returns the passes, and the tokens guessed and kept."""
    passes = drafted = kept = 0
    while going := [(r, f) for r, f in zip(rows, futures, strict=True) if len(r.token_ids) < len(f)]:
        for (one, future), draft in zip(going, lookup.propose([r for r, _ in going]), strict=True):
            right = future[len(one.token_ids) :]
            same = next(
                (i for i, (a, b) in enumerate(zip(draft, right, strict=False)) if a != b), min(len(draft), len(right))
            )
            one.token_ids += right[: same + 1]
            drafted, kept = drafted + len(draft), kept + same
        passes += 1
    return passes, drafted, kept


def test_the_longest_known_end_decides() -> None:
    texts = Texts()
    texts.begin([1, 2, 3, 7, 7, 7])
    texts.begin([9, 9, 9, 9, 9, 1, 2, 3, 5, 6])
    assert texts.after(texts.begin([8, 1, 2, 3]), 2) == (3, [5, 6])  # the last place of three
    assert texts.after(texts.begin([9, 9, 9, 9, 9, 1, 2, 3]), 8) == (8, [5, 6])
    assert texts.after(texts.begin([1, 2]), 8) == (0, [])
    own = texts.begin([4, 4, 4, 4])
    assert texts.after(own, 3) == (3, [4])  # what has not come yet is not guessed


def test_a_text_that_repeats_itself_needs_few_passes() -> None:
    period = [11, 12, 13, 14, 15, 16, 17]
    passes, drafted, kept = drive(
        Lookup(SpeculativeConfig(method="ngram"), fixed_tokens=100), [row("a", [1])], [period * 20]
    )
    assert passes < 35 and kept > 0.9 * drafted


def test_earlier_responses_and_the_group_are_read_only_for_history() -> None:
    dice = random.Random(1)
    text = [dice.randrange(1000) for _ in range(100)]
    earlier = (np.asarray(text, dtype=np.int32),)
    for method, most in (("history", 45), ("ngram", 101)):
        lookup = Lookup(SpeculativeConfig(method=method), fixed_tokens=100)
        assert drive(lookup, [row("a", [1, 2, 3], drafts=earlier)], [text])[0] <= most
        lookup = Lookup(SpeculativeConfig(method=method), fixed_tokens=100)
        first, second = row("a", [1, 2, 3]), row("b", [1, 2, 3])
        drive(lookup, [first], [text])
        assert drive(lookup, [second], [text])[0] <= most


def test_guesses_that_fail_rest_and_come_again() -> None:
    """Texts whose repetitions go on otherwise: few guesses; when they begin to come true, they are made again."""
    dice = random.Random(2)
    lookup = Lookup(SpeculativeConfig(method="ngram"), fixed_tokens=50)
    wrong = [t for _ in range(300) for t in (1, 2, 3, dice.randrange(100, 10_000))]
    passes, drafted, _ = drive(lookup, [row("a", [5])], [wrong[:1200]])
    assert drafted < 0.3 * passes
    passes, _, kept = drive(lookup, [row("b", [5])], [[1, 2, 3, 4] * 150])
    assert kept > 0.5 * 600


def test_many_rows_leave_no_room() -> None:
    """Where a token costs as much as a step, no guess pays, however sure."""
    futures = [[1, 2, 3, 4] * 30 for _ in range(4)]
    few, many = (Lookup(SpeculativeConfig(method="ngram"), fixed_tokens=fixed) for fixed in (100, 0.01))
    assert drive(few, [row(f"{i}", [9]) for i in range(4)], futures)[1] > 0
    assert drive(many, [row(f"{i}", [9]) for i in range(4)], futures)[1] == 0


def test_history_keeps_the_last_responses_within_its_bound(tmp_path: Path) -> None:
    history = History(SpeculativeConfig(method="history", history_megabytes=1))
    for epoch in range(10):
        history.note(3, 0, response([epoch] * 10))
    assert [each[0] for each in history.of(3, 0)] == list(range(2, 10)) and history.of(3, 1) == ()
    for index in range(4, 56):
        history.note(index, 0, response([index] * 5_000, drafted=7, kept=4))
    assert history.of(3, 0) == () and history.of(4, 0) == ()  # 20 kB each: the last fifty fit
    assert len(history.of(55, 0)) == 1
    told = history.metrics()
    assert told["drafts/history_mb"] <= 1 and told["drafts/proposed"] == 364
    assert told["drafts/kept_share"] == pytest.approx(4 / 7)
    assert told["drafts/tokens_a_pass"] == pytest.approx(260_100 / (260_100 - 208))
    assert history.metrics() == {}
    history.write(tmp_path)
    other = History(SpeculativeConfig(method="history", history_megabytes=1))
    other.read(tmp_path)
    assert all(np.array_equal(a, b) for i in range(56) for a, b in zip(history.of(i, 0), other.of(i, 0), strict=True))
    (tmp_path / FILE).unlink()
    other.read(tmp_path)  # an older checkpoint
    History(SpeculativeConfig(method="ngram")).write(tmp_path)
    assert not (tmp_path / FILE).exists()
