"""The engine with fake time: its tokens, its clock, its cache, and the same engine behind a step loop."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest

from verl_like.kit.bench.fake_time import FakeTimeEngine, FakeTimeRollout, VirtualClock, long_tailed, tokens_of
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError, SamplingParams

LIMIT_S = 20.0


def request(name: str, tokens: int = 10, *, prompt: int = 4, **fields: object) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=tokens)
    seed = sum(map(ord, name))
    return GenerationRequest(request_id=name, prompt_ids=[1] * prompt, sampling=sampling, seed=seed, **fields)  # type: ignore[arg-type]


def engine(**options: object) -> FakeTimeEngine:
    """A second for a decode step of one, 2 s for one of 101; a millisecond for a token of a prompt; no early end."""
    defaults = {"decode_s": {1: 1.0, 101: 2.0}, "prefill_s": 1e-3, "length_of": lambda request: 10**9}
    return FakeTimeEngine(**(defaults | options))  # type: ignore[arg-type]


def drain(fake: FakeTimeEngine) -> dict[str, Completion]:
    ended = {}
    while fake.has_unfinished():
        ended |= {completion.request_id: completion for completion in fake.step()}
    return ended


def test_tokens_are_a_function_of_seed_and_position() -> None:
    whole = tokens_of(7, 1000)
    assert whole.dtype == np.int32 and whole.min() >= 0 and whole.max() < 32_000 and len(set(whole.tolist())) > 950
    assert (tokens_of(7, 300, 250) == whole[250:300]).all()
    assert (tokens_of(8, 1000) != whole).mean() > 0.99


def test_a_resumed_response_goes_on_where_it_was_cut() -> None:
    fake = engine()
    asked = request("a", 50)
    fake.add(asked)
    for _ in range(20):
        fake.step()
    (cut,) = fake.drop(["a", "unknown"])
    assert cut.finish_reason == "abort" and len(cut.sampled) == 20
    fake.load(3)
    fake.add(request("a", 50, resume=cut.sampled))
    done = drain(fake)["a"]
    assert done.finish_reason == "length"
    assert done.token_ids == tokens_of(asked.seed or 0, 50).tolist()
    assert done.sampled.weight_versions.tolist() == [0] * 20 + [3] * 30


def test_time_is_that_of_the_table() -> None:
    fake = engine()
    fake.add(request("a", 3, prompt=500))
    drain(fake)
    assert fake.now == pytest.approx(3 * 1.0 + 0.5)
    for i in range(101):
        fake.add(request(f"r{i}", 2, prompt=1))
    drain(fake)
    assert fake.now == pytest.approx(3.5 + 2 * 2.0 + 0.101)
    assert (fake.num_steps, fake.num_sampled, fake.num_prefilled) == (5, 3 + 202, 601)


def test_lengths_and_reasons() -> None:
    fake = engine(length_of=lambda request: 5)
    fake.add(request("short", 3))
    fake.add(request("long", 9))
    done = drain(fake)
    assert [(len(done[n].sampled), done[n].finish_reason) for n in ("short", "long")] == [(3, "length"), (5, "stop")]
    lengths = sorted(long_tailed(request(f"{i}" * 3)) for i in range(1000))
    assert 100 < lengths[500] < 400 and lengths[990] > 1000


def test_capacity_priority_and_arrival() -> None:
    fake = engine(max_num_seqs=2)
    for name, priority in (("a", 0), ("b", 0), ("c", 0), ("d", -1)):
        fake.add(request(name, 2, priority=priority))
    assert [_names(fake) for _ in range(4)] == [[], ["a", "d"], [], ["b", "c"]]
    assert fake.most_running == 2
    with pytest.raises(ValueError, match="max_model_len=8"):
        FakeTimeEngine(max_model_len=8).add(request("e"))


def _names(fake: FakeTimeEngine) -> list[str]:
    return sorted(completion.request_id for completion in fake.step())


def test_the_cache_holds_sessions_until_the_next_load() -> None:
    fake = engine()
    fake.add(request("a", 10, prompt=100, session="s"))
    assert drain(fake)["a"].cached_tokens == 0
    fake.add(request("b", 10, prompt=150, session="s"))
    fake.add(request("c", 10, prompt=150))
    done = drain(fake)
    assert (done["b"].cached_tokens, done["c"].cached_tokens) == (110, 0)
    assert fake.num_prefilled == 100 + 40 + 150
    fake.load(1)
    fake.add(request("d", 10, prompt=200, session="s"))
    assert drain(fake)["d"].cached_tokens == 0


def test_a_load_costs_what_runs_another_prefill() -> None:
    fake = engine()
    fake.add(request("a", 8, prompt=100))
    fake.add(request("b", 8, prompt=10))
    for _ in range(3):
        fake.step()
    fake.load(1)
    fake.load(2)
    done = drain(fake)
    assert fake.num_prefilled == 110 + 116
    assert done["a"].sampled.weight_versions.tolist() == [0] * 3 + [2] * 5


def test_many_steps_in_one_call_end_the_same_way() -> None:
    results = []
    for steps_per_call in (1, 64):
        fake = FakeTimeEngine(max_num_seqs=8, steps_per_call=steps_per_call)
        for i in range(40):
            fake.add(request(f"r{i}", 300))
        done = drain(fake)
        results.append(({n: c.token_ids for n, c in done.items()}, fake.num_steps, round(fake.now, 6)))
    assert results[0] == results[1]


def test_an_hour_of_decoding_takes_seconds() -> None:
    fake = FakeTimeEngine(steps_per_call=32, length_of=lambda request: 2000 + (request.seed or 0) % 1000)
    begun = time.perf_counter()
    for i in range(24_000):
        fake.add(request(f"r{i}", 8192, prompt=500))
    drain(fake)
    assert fake.now > 3600 and fake.num_sampled > 48_000_000
    assert time.perf_counter() - begun < 30


def test_a_whole_engine_with_a_step_thread() -> None:
    rollout = FakeTimeRollout(FakeTimeEngine(version=None, length_of=lambda request: 10**9))
    try:
        with pytest.raises(RolloutError, match="no weights"):
            rollout.submit(request("a"))
        rollout.load_weights(iter(()), 4)
        done = rollout.generate([request("a", 30), request("b", 3)])
        assert [len(c.sampled) for c in done] == [30, 3]
        future = rollout.submit(request("c", 100_000))
        rollout.open()
        while not rollout.snapshot()["c"]:
            time.sleep(0.001)
        rollout.pause()
        so_far = len(rollout.snapshot()["c"])
        rollout.load_weights(iter(()), 5)
        rollout.open()
        while len(rollout.snapshot()["c"]) <= so_far:
            time.sleep(0.001)
        rollout.abort()
        ended = future.result(LIMIT_S)
        assert ended.finish_reason == "abort"
        assert np.bincount(ended.sampled.weight_versions)[4] == so_far
        assert ended.sampled.weight_versions[-1] == 5
    finally:
        rollout.shutdown()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_tokens": 5}, "min_tokens=5 is more than max_tokens=4"),
        ({"bad_words": tuple((i,) for i in range(32_000))}, "nothing is left to sample"),
    ],
)
def test_sampling_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    rollout = FakeTimeRollout(FakeTimeEngine())
    assert rollout.tokenizer_size == 32_000
    asked = request("a", 4)
    with pytest.raises(ValueError, match=said):
        rollout.submit(dataclasses.replace(asked, sampling=dataclasses.replace(asked.sampling, **changes)))
    rollout.shutdown()


def test_requests_of_a_stream_that_breaks_off_are_ended() -> None:
    rollout = FakeTimeRollout(FakeTimeEngine(length_of=lambda request: 10**9))
    try:
        with pytest.raises(ValueError, match="does not fit"):
            rollout.generate([request("a", 10**6), request("b", 10**7)])
        stream = rollout.stream([request("a", 10**6), request("b", 3)])
        assert [c.request_id for c in next(stream)] == ["b"]
        stream.close()
        assert rollout.paused and rollout.snapshot() == {} and not rollout.fake.has_unfinished()
        assert len(rollout.generate([request("a", 5)])[0].sampled) == 5
    finally:
        rollout.shutdown()


def test_the_clock_keeps_the_order_of_events() -> None:
    clock, seen = VirtualClock(), list[tuple[float, str]]()
    for at, name in ((2.0, "b"), (1.0, "a"), (2.0, "c")):
        clock.at(at, lambda name=name: seen.append((clock.now, name)))
    clock.at(1.5, lambda: clock.at(0.0, lambda: seen.append((clock.now, "late"))))
    clock.run(1.75)
    assert (clock.now, seen) == (1.75, [(1.0, "a"), (1.5, "late")])
    clock.run()
    assert seen[2:] == [(2.0, "b"), (2.0, "c")]
