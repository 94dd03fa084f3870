"""The collector over replicas with fake time: what is drawn, kept, given back, counted and resumed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.episodes.fleet import N, Verdict, collector, dataset, teaches
from verl_like.batch import MediaHandle, Prompt
from verl_like.config import AlgorithmConfig, FilterGroupsConfig, LengthRewardConfig, RewardModelConfig
from verl_like.config.errors import RunStopped
from verl_like.config.ppo import AsyncTrainingConfig
from verl_like.data.dataset import PromptDataset
from verl_like.episodes.answering import Answering
from verl_like.episodes.episode import Ask, Episode, EpisodeFailure, SingleTurn, Turn
from verl_like.episodes.outcomes import Policies
from verl_like.kit.bench.fake_time import FakeTimeEngine, tokens_of
from verl_like.models.images import MediaError
from verl_like.observe.logs import DiscreetFormatter
from verl_like.rewards.grading import RewardError
from verl_like.rewards.reward_call import RewardOutcome
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError, SamplingParams, request_seed
from verl_like.rollout.wire_errors import heard, told


@pytest.fixture
def data(tmp_path: Path) -> PromptDataset:
    return dataset(tmp_path)


def filtering(**rules: Any) -> AlgorithmConfig:
    return AlgorithmConfig(filter_groups=FilterGroupsConfig(enable=True, **rules))


def steps(made: Any, count: int, first: int = 1) -> list[tuple[list[int], list[int], list[float]]]:
    """(positions, tokens, sum of each group's scores) of each step's batch."""
    taken = []
    for step in range(first, first + count):
        rollouts, pending = made.next_batch(step)
        pending.wait()
        rollouts.check()
        taken.append(
            (
                [row.index for row in rollouts.rows],
                rollouts.response_ids_BR.tolist(),
                pending.result().score_B.view(-1, N).sum(dim=1).tolist(),
            )
        )
    return taken


def test_what_is_logged_of_an_episode_has_the_name_that_its_row_has(data: PromptDataset) -> None:
    formatter, lines = DiscreetFormatter("%(message)s", as_json=True), list[str]()

    class Talks(SingleTurn):
        async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
            await asyncio.sleep(0.001 * (7 * prompt.group + 3 * sample % 5))  # in any order
            lines.append(formatter.format(logging.makeLogRecord({"msg": f"{prompt.group} {sample}"})))
            return await super().run(prompt, sample, ask)

    with collector(data, runner=Talks()) as (made, _):
        names = made.next_batch(1)[0].episode_names
    assert names == [f"train-{group}-{sample}" for group in range(4) for sample in range(N)]
    told = [json.loads(line) for line in lines]
    assert sorted(each["episode"] for each in told) == sorted(names)
    assert all(each["episode"].split("-")[1:] == each["message"].split() for each in told)
    assert "episode" not in formatter.format(logging.makeLogRecord({"msg": "of none"}))


# ---- races: more episodes than are needed


class Paced(FakeTimeEngine):
    """Not faster than what ends is seen."""

    def step(self) -> list[Completion]:
        time.sleep(0.01)
        return super().step()


def long_first(request: GenerationRequest) -> int:
    return 40 if request.request_id.split("-")[2] == "0" else 5


def test_a_race_keeps_those_that_end_first_and_tells_how_short_they_are(data: PromptDataset) -> None:
    with collector(data, engines=[Paced(length_of=long_first)], n_redundant=1) as (made, fleet):
        rollouts, pending = made.next_batch(1)
        rollouts.check()
        assert rollouts.group_B.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        for row, (group, sample) in enumerate((g, s) for g in range(4) for s in (1, 2)):
            seed = request_seed(1, "train", group, sample, 0)
            assert rollouts.response_ids_T.split(5)[row].tolist() == tokens_of(seed, 5).tolist()
        assert len(fleet.asked) == 12 and fleet.left == {}
        pending.wait()
        metrics = made.metrics()
        assert metrics["redundancy/discarded_episodes"] == 4
        assert 4 * 5 <= metrics["redundancy/discarded_tokens"] < 4 * 40
        assert metrics["redundancy/episode_length/used"] == 5 < metrics["redundancy/episode_length/begun"]


def test_a_race_replaces_episodes_that_hang_or_are_lost(data: PromptDataset) -> None:
    """The first of each group hangs, the second crashes at once: it is not among the first that end well."""
    ended, hangs = [], True

    class Game(SingleTurn):
        async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
            if sample == 0 and hangs:
                try:
                    await asyncio.sleep(1000)
                finally:
                    ended.append(prompt.group)
            if sample == 1:
                return Episode.lost(prompt, EpisodeFailure(kind="crash", message="the environment crashed"))
            return await super().run(prompt, sample, ask)

    with collector(data, runner=Game(), n_redundant=2) as (made, fleet):
        _, pending = made.next_batch(1)
        pending.wait()
        assert pending.result().valid_B.all()
        assert sorted(ended) == [0, 1, 2, 3] and {r.request_id.split("-")[2] for r in fleet.asked} == {"2", "3"}
        metrics = made.metrics()  # what was lost is not hidden by those that took its place
        assert metrics["redundancy/lost_episodes"] == 4 and metrics["redundancy/discarded_episodes"] == 8
        assert metrics["outcomes/lost_fraction"] == pytest.approx(4 / 12)
    few = {"runner": Game(), "n_redundant": 2, "policies": Policies(max_lost=0.3)}
    with collector(data, **few) as (made, _), pytest.raises(RunStopped, match=r"4 of 12 .*\n.*environment crashed"):
        made.next_batch(1)[1].result()
    hangs = False
    with collector(data, runner=Game(), n_redundant=1, n=4) as (made, fleet):  # one lost episode is needed after all
        assert len(made.next_batch(1)[0]) == 16 and len(fleet.asked) == 16


def test_a_race_has_its_baseline_besides(data: PromptDataset) -> None:
    with collector(data, n_redundant=1, greedy_too=True, algorithm=AlgorithmConfig(adv_estimator="remax")) as (made, f):
        assert len(made.next_batch(1)[0]) == 8
        greedy = [request for request in f.asked if not request.sampling.do_sample]
        assert [request.request_id for request in greedy] == [f"train-{group}-3-0" for group in range(4)]


def test_an_error_in_a_race_is_the_steps(data: PromptDataset) -> None:
    class Broken(SingleTurn):
        async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
            raise KeyError("a mistake of the runner")

    with collector(data, runner=Broken(), n_redundant=1) as (made, _), pytest.raises(KeyError, match="a mistake"):
        made.next_batch(1)


# ---- plain batches


def test_a_plain_batch_holds_n_responses_to_each_prompt_in_the_order_of_draws(data: PromptDataset) -> None:
    with collector(data, engines=[FakeTimeEngine(), FakeTimeEngine()]) as (made, fleet):
        rollouts, pending = made.next_batch(1)
        assert rollouts.group_B.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        for row, (group, sample) in enumerate((g, s) for g in range(4) for s in range(N)):
            length = int(rollouts.response_length_B[row])
            seed = request_seed(1, "train", group, sample, 0)
            assert rollouts.response_ids_BR[row, :length].tolist() == tokens_of(seed, length).tolist()
        assert sorted(pending.result().score_B.tolist()) == sorted([1.0, 1.0, 1.0, 0.0, 2.0, 0.0, 1.0, 1.0])
        assert [engine.fake.num_sampled > 0 for engine in fleet.engines] == [True, True]
        for group in range(4):  # one replica computes a prompt, for all of its responses
            assert len({r.session for r in fleet.asked if r.request_id.startswith(f"train-{group}-")}) == 1
        made.next_batch(2)
        assert len(fleet.asked) == 16 and made.state_dict()["draws"] == 8
        assert made.state_dict()["ledger"] == {"used": 8, "dropped": 0, "aborted": 0, "stale": 0}


def test_noise_depends_on_the_draw_and_not_on_the_step(data: PromptDataset) -> None:
    with collector(data) as (made, _), collector(data) as (again, _):
        assert made.next_batch(1)[0].response_ids_BR.tolist() == again.next_batch(77)[0].response_ids_BR.tolist()
    with collector(data, seed=2) as (other, _), collector(data, purpose="val") as (val, _):
        drawn = [each.next_batch(1)[0].response_ids_BR[0, :3].tolist() for each in (other, val)]
    assert drawn[0] != drawn[1]


def test_without_seeds_requests_have_none_and_spread_ones_have_sessions_of_their_own(data: PromptDataset) -> None:
    with collector(data, seed=None, spread=True) as (made, fleet):
        made.next_batch(1)
        assert {request.seed for request in fleet.asked} == {None}
        assert len({request.session for request in fleet.asked}) == 8


def test_tokens_of_other_weights_are_refused(data: PromptDataset) -> None:
    with collector(data) as (made, _):
        made.weights_changed(0)
        made.next_batch(1)
        made.weights_changed(1)
        with pytest.raises(RuntimeError, match=r"weights of version \[0\], not of 1 alone"):
            made.next_batch(2)


def test_a_dead_replica_ends_the_step(data: PromptDataset) -> None:
    engine = FakeTimeEngine()
    engine.failure = RuntimeError("power cut")
    with collector(data, engines=[engine]) as (made, _), pytest.raises(RolloutError, match="power cut"):
        made.next_batch(1)


def test_a_request_that_the_engine_refuses_ends_the_step_and_the_next_one_works(data: PromptDataset) -> None:
    with collector(data, engines=[FakeTimeEngine(max_model_len=5000)]) as (made, fleet):
        made.how = dataclasses.replace(made.how, sampling=SamplingParams(max_tokens=10_000))
        with pytest.raises(ValueError, match="does not fit"):
            made.next_batch(1)
        made.how = dataclasses.replace(made.how, sampling=SamplingParams(max_tokens=100))
        assert len(made.next_batch(2)[0]) == 8
        assert fleet.left == {}


def test_a_picture_that_cannot_be_used_is_the_failure_of_its_row(
    data: PromptDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is found when its row is drawn, one by the engine; the others are trained, and the next step goes on."""
    read = PromptDataset.__getitem__

    def draw(self: PromptDataset, index: int) -> Any:
        if index == 1:
            raise MediaError("row 1: image 0 is no image")
        ids, row = read(self, index)
        media = [MediaHandle(kind="image", path="a", column="images", row=index, number=0)] if index == 2 else []
        return ids, dataclasses.replace(row, media=media)

    class Shows(SingleTurn):
        async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
            if prompt.row.media:
                raise heard(told(MediaError("row 2: image 0 cannot be decoded")))
            return await super().run(prompt, sample, ask)

    monkeypatch.setattr(PromptDataset, "__getitem__", draw)
    with collector(data, runner=Shows()) as (made, fleet):
        rollouts, pending = made.next_batch(1)
        pending.wait()
        scores = pending.result()
        assert scores.valid_B.tolist() == [True, True, False, False, False, False, True, True]
        assert [failure and (failure.kind, failure.message) for failure in scores.failures[2:6]] == [
            *[("media", "row 1: image 0 is no image")] * 2, *[("media", "row 2: image 0 cannot be decoded")] * 2
        ]  # fmt: skip
        assert rollouts.media is None and rollouts.response_length_B.tolist()[2:6] == [0] * 4  # nobody opens them again
        assert {request.request_id.split("-")[1] for request in fleet.asked} == {"0", "3"}
        assert made.metrics()["outcomes/environment_error"] == 4
        assert made.next_batch(2)[1].result().valid_B.all()


# ---- episodes of several turns


class ThreeTurns:
    """Asks three times; what it is told between is the turn's number."""

    async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        turns, context, observed = [], list(prompt.ids), list(prompt.ids)
        for number in range(3):
            done = await ask(context, SamplingParams(max_tokens=5))
            turns.append(Turn.of(observed, done))
            await asyncio.sleep(0.001 * sample)  # a tool
            observed = [number]
            context = [*context, *done.token_ids, *observed]
        return Episode(turns=tuple(turns))


def test_turns_of_an_episode_share_a_session_and_have_seeds_of_their_own(data: PromptDataset) -> None:
    with collector(data, runner=ThreeTurns()) as (made, fleet):
        rollouts, pending = made.next_batch(1)
        rollouts.check()
        assert rollouts.step_BR is not None and int(rollouts.step_BR.max()) == 2 and len(pending.result()) == 8
        assert [r.turn for r in fleet.asked if r.request_id.startswith("train-2-1-")] == [0, 1, 2]
        seeds = [r.seed for r in fleet.asked]
        assert len(set(seeds)) == len(seeds) == 24 and len({r.session for r in fleet.asked}) == 4
        last = rollouts.response_ids_BR[0].tolist()
        assert last[5] == 0 and last[11] == 1 and int(rollouts.response_mask_BR[0].sum()) == 15


def test_min_tokens_shrinks_to_the_room_of_a_turn(data: PromptDataset) -> None:
    """A client's own limit, or what is left of the response; an engine refuses more tokens at least than at most."""

    class LittleRoom(SingleTurn):
        async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
            done = await ask(list(prompt.ids), SamplingParams(max_tokens=9, min_tokens=6), max_tokens=4)
            return Episode(turns=(Turn.of(prompt.ids, done),))

    with collector(data, runner=LittleRoom()) as (made, fleet):
        made.next_batch(1)
        assert {(r.sampling.min_tokens, r.sampling.max_tokens) for r in fleet.asked} == {(4, 4)}


def test_an_error_in_an_episode_is_the_steps(data: PromptDataset) -> None:
    class Broken(SingleTurn):
        async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
            if prompt.group == 2:
                raise KeyError("my bug")
            return await super().run(prompt, sample, ask)

    with collector(data, runner=Broken()) as (made, fleet):
        with pytest.raises(KeyError, match="my bug"):
            made.next_batch(1)
        assert fleet.left == {}


def test_an_episode_that_tries_to_end_the_process_ends_the_step(data: PromptDataset) -> None:
    class Exits(SingleTurn):
        async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
            raise SystemExit("usage: ...")

    with collector(data, runner=Exits()) as (made, _):
        for step in (1, 2):
            with pytest.raises(RuntimeError, match=r"prompt \d .*sample \d, tried to end the process: SystemExit"):
                made.next_batch(step)


def test_an_episode_that_cancels_itself_is_named(data: PromptDataset) -> None:
    class Cancels(SingleTurn):
        async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
            task = asyncio.ensure_future(asyncio.sleep(60))
            task.cancel()
            await task
            raise AssertionError

    named = pytest.raises(RuntimeError, match=r"sample \d, was cancelled from within")
    with collector(data, runner=Cancels()) as (made, _), named:
        made.next_batch(1)


def endless_for(*groups: int, short: int = 10) -> list[FakeTimeEngine]:
    """Responses of these groups never end."""

    def length(request: GenerationRequest) -> int:
        return 10**9 if int(request.request_id.split("-")[1]) in groups else short

    return [FakeTimeEngine(length_of=length, max_model_len=2 * 10**9)]


LONG = SamplingParams(max_tokens=10**9)


def test_a_turn_that_a_runner_has_no_patience_for_is_aborted(data: PromptDataset) -> None:
    class Impatient(SingleTurn):
        async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
            try:
                return await asyncio.wait_for(super().run(prompt, sample, ask), 0.2)
            except TimeoutError:
                return Episode(turns=(Turn.of(prompt.ids, await ask(prompt.ids, SamplingParams(max_tokens=1))),))

    with collector(data, runner=Impatient(), engines=endless_for(1), sampling=LONG) as (made, fleet):
        rollouts, _ = made.next_batch(1)
        assert rollouts.response_length_B.tolist() == [10, 10, 1, 1, 10, 10, 10, 10] and fleet.left == {}


class Hangs(SingleTurn):
    """After its first turn the episodes of prompts 1 and 2 wait for a tool that never answers; it tries again after
    whatever goes wrong with a turn."""

    async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        episode = await super().run(prompt, sample, ask)
        while prompt.group in (1, 2):
            try:
                await asyncio.sleep(1000 if sample else 0)
                await ask(prompt.ids)
            except Exception:
                continue
        return episode


def test_a_batch_that_is_full_waits_for_no_tool_and_no_turn(data: PromptDataset) -> None:
    settings: dict[str, Any] = {"batch": 3, "additional": 2, "aborted": "drop", "engines": endless_for(short=5)}
    with collector(data, runner=Hangs(), **settings) as (made, fleet):
        start = time.monotonic()
        assert made.next_batch(1)[0].group_B.unique().tolist() == [0, 3, 4] and time.monotonic() - start < 8
        assert fleet.left == {}
        asked = len(fleet.asked)
        tokens = 5 * sum(r.request_id.split("-")[1] in "12" for r in fleet.asked)
        assert 0.5 * tokens <= made.metrics()["scheduler/unused_tokens"] <= tokens  # the last ones may be cut
        assert made.next_batch(2)[0].group_B.tolist() == [5, 5, 6, 6, 7, 7]
        assert not any(r.request_id.split("-")[1] in "12" for r in fleet.asked[asked:])


# ---- dynamic sampling


def test_it_draws_until_the_batch_is_full_of_groups_with_a_signal(data: PromptDataset) -> None:
    """Positions 0, 3, 6, 9 teach nothing."""
    with collector(data, draw=4, algorithm=filtering()) as (made, _):
        rollouts, pending = made.next_batch(1)
        assert [row.index for row in rollouts.rows] == [1, 1, 2, 2, 4, 4, 5, 5]
        assert rollouts.group_B.tolist() == [1, 1, 2, 2, 4, 4, 5, 5]
        assert pending.result().score_B.view(4, N).sum(dim=1).tolist() == [1.0, 2.0, 4.0, 5.0]
        metrics = made.metrics()
        assert metrics["train/num_gen_batches"] == 6 / 4
        assert metrics["filter_groups/num_drawn"] == 6 and metrics["filter_groups/num_dropped"] == 2
        assert metrics["filter_groups/signal_fraction"] == pytest.approx(2 / 3)
        assert metrics["filter_groups/score_mean_drawn"] == pytest.approx((2 * 1 + 2 * 1 + 1 + 2 + 4 + 5) / 12)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("before", range(5))
def test_a_resumed_collector_goes_on_exactly_where_it_stopped(data: PromptDataset, before: int, alone: bool) -> None:
    settings: dict[str, Any] = {"batch": 3, "draw": 4, "algorithm": filtering(), "alone": alone}
    with collector(data, **settings) as (made, _):
        whole = steps(made, 5)
    with collector(data, **settings) as (first, _):
        steps(first, before)
        state = json.loads(json.dumps(first.state_dict()))
    with collector(data, **settings) as (second, _):
        second.load_state_dict(state)
        assert steps(second, 5 - before, first=before + 1) == whole[before:]
    assert len({str(step) for step in whole}) > 1


@pytest.mark.parametrize(("batch", "draw"), [(2, 4), (4, 6), (2, 3), (4, 4), (1, 5)])
@pytest.mark.parametrize("alone", [True, False])
def test_no_prompt_is_lost_or_trained_on_twice_in_an_epoch(
    data: PromptDataset, batch: int, draw: int, alone: bool
) -> None:
    useful = [p for p in range(12) if p % 3]
    with collector(data, batch=batch, draw=draw, algorithm=filtering(), alone=alone) as (made, _):
        taken = steps(made, 8 // batch)
        assert sorted(row for rows, _, _ in taken for row in rows) == sorted(useful * N)
        state = made.state_dict()
        ledger = state["ledger"]
        assert ledger["used"] == 8 and ledger["used"] + ledger["dropped"] + len(state["returned"]) == state["draws"]


def test_groups_are_taken_in_draw_order_however_long_their_responses_are(data: PromptDataset) -> None:
    """The first prompts' responses are the longest by far; without rounds, others begin meanwhile."""

    def length(request: GenerationRequest) -> int:
        return 1500 if request.request_id.split("-")[1] in "12" else 3

    with collector(data, draw=8, algorithm=filtering(), engines=[FakeTimeEngine(length_of=length)]) as (made, _):
        assert steps(made, 1)[0][0] == [1, 1, 2, 2, 4, 4, 5, 5]
        assert made.metrics()["scheduler/num_unused"] > 0


def test_it_gives_up_and_names_the_keys(data: PromptDataset) -> None:
    def verdict(position: int, nth: int) -> float:
        return 1.0 if position else float(nth)

    with collector(data, draw=4, verdict=verdict, algorithm=filtering(max_num_gen_batches=2)) as (made, _):
        with pytest.raises(RunStopped) as caught:  # for people: both launchers end with its text alone
            made.next_batch(1)
        text = str(caught.value)
        assert "step 1: 2 draws (8 prompts, mean score 0.938) gave 1 groups with a signal" in text
        for key in (
            "data.train_batch_size=4",
            "max_num_gen_batches=8 (now 2)",
            "rollout.n=2 (now 1)",
            "resample=false",
        ):
            assert key in text


@pytest.mark.parametrize("alone", [True, False])
def test_without_a_bound_it_stops_after_ten_passes(data: PromptDataset, alone: bool) -> None:
    with collector(data, draw=4, verdict=lambda p, n: 0.0, algorithm=filtering(), alone=alone) as (made, fleet):
        with pytest.raises(RunStopped, match=r"30 draws .*Set actor_rollout_ref.rollout.n=2 "):
            made.next_batch(1)
        assert len(fleet.asked) == 120 * N


@pytest.mark.parametrize("alone", [True, False])
def test_a_grader_that_always_fails_is_no_lack_of_signals(data: PromptDataset, alone: bool) -> None:
    with (
        collector(data, draw=4, verdict=lambda p, n: None, algorithm=filtering(), alone=alone) as (made, fleet),
        pytest.raises(RewardError, match=r"every response \(8\) failed \(8 x timeout\)"),
    ):
        made.next_batch(1)
    assert len(fleet.asked) < 40 * N


@pytest.mark.parametrize("alone", [True, False])
def test_too_many_failures_are_too_many_whatever_ends_when(data: PromptDataset, alone: bool) -> None:
    def verdict(position: int, nth: int) -> float | None:
        return None if nth == 0 else float(position)

    algorithm = filtering(range=[-1.0, 100.0])
    with collector(data, n=3, draw=8, verdict=verdict, algorithm=algorithm, alone=alone) as (made, _):
        made.rewards.most_failures = 0.1  # type: ignore[attr-defined]
        with pytest.raises(RewardError, match=r"of \d+ rewards failed"):
            made.next_batch(1)


def test_keep_and_mask_draws_once(data: PromptDataset) -> None:
    with collector(data, algorithm=filtering(resample=False)) as (made, fleet):
        rollouts, pending = made.next_batch(1)
        assert [row.index for row in rollouts.rows] == [0, 0, 1, 1, 2, 2, 3, 3]
        trained_B = pending.result().trained_B
        assert trained_B is not None and trained_B.tolist() == [False, False, True, True, True, True, False, False]
        assert len(fleet.asked) == 8
        assert made.metrics()["filter_groups/num_dropped"] == 2 and made.metrics()["train/num_gen_batches"] == 1


# ---- groups that lost members


def failing(position: int, nth: int) -> float | None:
    """Of position 1 one response fails, of position 2 both do."""
    return None if position == 2 or (position == 1 and nth == 0) else teaches(position, nth)


def test_small_groups_are_masked_and_counted(data: PromptDataset) -> None:
    with collector(data, verdict=failing, algorithm=AlgorithmConfig(min_group_size=2)) as (made, _):
        _, pending = made.next_batch(1)
        scores = pending.result()
        assert scores.trained_B is not None and scores.trained_B.view(4, N)[:, 0].tolist() == [True, False, False, True]
        assert made.metrics()["groups/too_small"] == 2
    with collector(data, verdict=failing) as (made, _):
        scores = made.next_batch(1)[1].result()
        assert scores.trained_B is None and int(scores.valid_B.sum()) == 5


def test_failures_name_their_rows_of_the_batch(data: PromptDataset) -> None:
    verdict: Verdict = lambda p, n: None if p == 4 and n == 1 else teaches(p, n)  # noqa: E731
    with collector(data, batch=4, draw=6, verdict=verdict, algorithm=filtering()) as (made, _):
        rollouts, pending = made.next_batch(1)
        assert 4 not in [row.index for row in rollouts.rows]  # one response has nothing to compare with
        for row, failure in enumerate(pending.result().failures):
            assert failure is None or failure.row == row


def lacking(position: int, nth: int) -> RewardOutcome:
    """The reward function gives no `part` for one response of position 4, and none but text for one of position 1."""
    part: dict[str, Any] = {"part": "?"} if (position, nth) == (1, 1) else {"part": position * (nth == 0)}
    return RewardOutcome(score=teaches(position, nth), extras={} if (position, nth) == (4, 0) else part)


GDPO = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["part"]}


@pytest.mark.parametrize("asynchronous", [None, AsyncTrainingConfig()])
@pytest.mark.parametrize("alone", [True, False])
def test_a_row_without_what_training_reads_is_a_failed_reward(
    data: PromptDataset, alone: bool, asynchronous: AsyncTrainingConfig | None, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"alone": alone, "asynchronous": asynchronous, "algorithm": AlgorithmConfig(**GDPO)}
    with collector(data, batch=6, verdict=lacking, **options) as (made, _):
        rollouts, pending = made.next_batch(1)
        scores = pending.result()
        failed = {rollouts.rows[f.row].index: f.kind for f in scores.failures if f is not None}
        # an asynchronous batch is what finished first: a position may be in the next one
        lack = {1, 4} & {row.index for row in rollouts.rows} if asynchronous else {1, 4}
        assert failed == dict.fromkeys(lack, "bad_value") and int(scores.valid_B.sum()) == 12 - len(lack)
        assert made.metrics().get("outcomes/grader_error", 0) == len(lack)
        told = f"step 1: {len(lack)} of 12 rows lack a value" in caplog.text
        assert told == bool(lack) == ("algorithm.gdpo_reward_keys=part" in caplog.text)


def test_a_group_that_lacks_the_metric_of_the_filter_is_no_end_of_the_run(data: PromptDataset) -> None:
    with collector(data, verdict=lacking, algorithm=filtering(metric="part")) as (made, _):
        rollouts, pending = made.next_batch(1)
        # 0 teaches nothing; 1 and 4 have one row to compare
        assert {row.index for row in rollouts.rows} == {2, 3, 5, 6}
        assert pending.result().valid_B.all()


def test_a_key_that_no_row_has_ends_the_run_by_its_name(data: PromptDataset) -> None:
    algorithm = AlgorithmConfig(adv_estimator="gdpo", gdpo_reward_keys=["typo"])
    with collector(data, verdict=lacking, algorithm=algorithm) as (made, _):
        _, pending = made.next_batch(1)
        with pytest.raises(RewardError, match=r"bad_value: algorithm.gdpo_reward_keys=typo: .* part, and no 'typo'"):
            pending.result()
    with (
        collector(data, verdict=lacking, algorithm=filtering(metric="typo")) as (made, _),
        pytest.raises(RewardError, match=r"algorithm.filter_groups.metric=typo: .* part, and no 'typo'"),
    ):
        made.next_batch(1)


# ---- greedy baselines (remax)


def test_each_prompt_is_answered_once_greedily_and_its_score_reaches_all_its_rows(data: PromptDataset) -> None:
    algorithm = AlgorithmConfig(adv_estimator="remax")
    with collector(data, verdict=lambda p, n: 10.0 * p, algorithm=algorithm, greedy_too=True) as (made, fleet):
        rollouts, pending = made.next_batch(1)
        pending.wait()
        scores = pending.result()
        assert len(rollouts) == 8 and scores.baseline_B is not None
        assert scores.baseline_B.tolist() == [0, 0, 10, 10, 20, 20, 30, 30]
        greedy = [request for request in fleet.asked if request.sampling.greedy]
        assert [r.request_id for r in greedy] == [f"train-{p}-2-0" for p in range(4)]
        metrics = made.metrics()
        assert metrics["remax/failures"] == 0 and metrics["remax/response_length/mean"] > 0


def test_rows_without_a_baseline_are_left_out_and_counted(data: PromptDataset) -> None:
    asked: dict[int, int] = {}

    def verdict(position: int, nth: int) -> float | None:
        return None if position == 2 else 10.0 * (position + 1)

    config = AlgorithmConfig(adv_estimator="remax", reward_clip=12.0)
    with collector(data, verdict=verdict, algorithm=config, greedy_too=True) as (made, _):
        made.config.reward_model = RewardModelConfig(length_reward=LengthRewardConfig(enable=False))
        _, pending = made.next_batch(1)
        scores = pending.result()
        assert scores.valid_B.view(4, N)[:, 0].tolist() == [True, True, False, True]
        assert scores.baseline_B is not None and scores.baseline_B.view(4, N)[[0, 1, 3], 0].tolist() == [10, 12, 12]
        assert scores.score_B.view(4, N)[[0, 1, 3], 0].tolist() == [
            10,
            20,
            40,
        ]  # not shaped yet
        assert torch.isnan(scores.score_B.view(4, N)[2]).all() and made.metrics()["remax/failures"] == 1
    assert not asked


class Rewritten(SingleTurn):
    """Two rows an episode."""

    async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
        first, second = await ask(prompt.ids), await ask([9, 9])
        return Episode(turns=(Turn.of(prompt.ids, first), dataclasses.replace(Turn.of([9, 9], second), new_row=True)))


@pytest.mark.parametrize("rules", [AlgorithmConfig(), filtering(resample=False), filtering()])
def test_episodes_of_several_rows_have_one_score_and_one_baseline(data: PromptDataset, rules: AlgorithmConfig) -> None:
    with collector(data, draw=4, runner=Rewritten(), algorithm=rules, greedy_too=True) as (made, _):
        rollouts, pending = made.next_batch(1)
        scores = pending.result()
        assert len(rollouts) == len(scores) == 4 * N * 2 and rollouts.episode_B is not None
        assert scores.baseline_B is not None and not scores.baseline_B.isnan().any()
        for values in (scores.score_B, scores.baseline_B, scores.valid_B):
            assert values.view(-1, 2)[:, 0].tolist() == values.view(-1, 2)[:, 1].tolist()
        metrics = made.metrics()
        if rules.filter_groups.enable:
            assert metrics["filter_groups/num_drawn"] >= 4 and metrics["filter_groups/score_mean_drawn"] > 0


# ---- additional prompts: the fastest groups make the batch


def test_the_fastest_groups_are_used_and_the_slowest_prompt_is_waited_for_in_the_next_step(data: PromptDataset) -> None:
    tries = 0

    def length(request: GenerationRequest) -> int:
        """The first prompt's responses are endless, until it is asked again."""
        nonlocal tries
        if request.request_id.split("-")[1] != "0":
            return 10
        tries += 1
        return 10**7 if tries <= N else 30

    sampling = SamplingParams(max_tokens=10**8)
    engines = [FakeTimeEngine(length_of=length, max_model_len=10**9)]
    with collector(data, batch=3, additional=2, engines=engines, sampling=sampling) as (made, fleet):
        first, _ = made.next_batch(1)
        assert 0 not in first.group_B.tolist() and len(first) == 3 * N
        metrics = made.metrics()
        assert metrics["scheduler/num_unused"] >= 1 and metrics["scheduler/unused_tokens"] > 0
        assert metrics["scheduler/response_length/used"] == 10 < metrics["scheduler/response_length/begun"]
        second, _ = made.next_batch(2)
        assert 0 in second.group_B.tolist()[: 2 * N]  # it is waited for, and comes before those that are new
        assert made.state_dict()["ledger"]["used"] == 6
        ids = [r.request_id for r in fleet.asked if r.request_id.startswith("train-0-")]
        assert sorted(ids) == ["train-0-0-0", "train-0-0-0", "train-0-1-0", "train-0-1-0"]


def test_additional_prompts_lose_and_repeat_none(data: PromptDataset) -> None:
    with collector(data, batch=3, additional=2, engines=[FakeTimeEngine(), FakeTimeEngine()]) as (made, _):
        taken = [group for step in range(12) for group in set(made.next_batch(step)[0].group_B.tolist())]
        state = made.state_dict()
        assert len(taken) == len(set(taken)) == 36
        waiting = {number for _, number in state["returned"]}
        assert set(taken) | waiting == set(range(state["draws"])) and not set(taken) & waiting


def test_aborted_prompts_are_counted_where_they_are_dropped(data: PromptDataset) -> None:
    with collector(data, batch=3, additional=2, aborted="drop") as (made, _):
        taken = [group for step in range(6) for group in set(made.next_batch(step)[0].group_B.tolist())]
        state = made.state_dict()
        assert len(taken) == len(set(taken)) == 18 and state["returned"] == []
        assert state["ledger"] == {"used": 18, "dropped": 0, "aborted": state["draws"] - 18, "stale": 0}


def test_additional_prompts_with_a_filter(data: PromptDataset) -> None:
    with collector(data, batch=3, additional=2, draw=3, algorithm=filtering()) as (made, _):
        for step in range(4):
            rollouts, pending = made.next_batch(step)
            assert all(row.index % 3 for row in rollouts.rows) and len(pending.result()) == 6


# ---- validation


def test_given_prompts_are_answered_in_their_own_way(data: PromptDataset) -> None:
    how = Answering(runner=SingleTurn(), sampling=SamplingParams(max_tokens=7), n=3, seed=1, purpose="val")
    prompts = [Prompt(ids=[5], row=data[i][1], group=i, position=i) for i in (4, 2)]
    with collector(data) as (made, fleet):
        rollouts, pending = made.answer(prompts, how, step=9)
        assert [row.index for row in rollouts.rows] == [4, 4, 4, 2, 2, 2] and len(pending.result()) == 6
        assert int(rollouts.response_length_B.max()) <= 7
        assert {r.request_id for r in fleet.asked} == {f"val-{g}-{s}-0" for g in (4, 2) for s in range(3)}
        assert made.state_dict()["draws"] == 0
        outcomes = pending.result().outcomes
        assert outcomes is not None and set(outcomes) <= {"solved", "failed", "truncated"}
    with collector(data, verdict=lambda p, n: None) as (made, _):
        scores = made.answer(prompts, how, step=9)[1].result()
        assert not scores.valid_B.any() and scores.outcomes == ["grader_error"] * 6
