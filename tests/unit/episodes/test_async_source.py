"""Groups that live across steps, over replicas with fake time: what is trained, when, once, and after a resume."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.episodes.fleet import Fleet, N, Rewards, collector, dataset, teaches
from verl_like.batch import Prompt
from verl_like.config import AlgorithmConfig, FilterGroupsConfig
from verl_like.config.errors import RunStopped
from verl_like.config.ppo import AsyncTrainingConfig
from verl_like.data.dataset import PromptDataset
from verl_like.data.loader import read_prompts
from verl_like.episodes import partial_responses
from verl_like.episodes.answering import Collection, Trail
from verl_like.episodes.episode import Ask, Episode, SingleTurn
from verl_like.heartbeat import EPISODE
from verl_like.kit.bench.fake_time import FakeTimeEngine, tokens_of
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError, SamplingParams, request_seed

ROWS = 24
LONG = 12  # tokens of the first response to every third prompt; all others have 4


@pytest.fixture
def data(tmp_path: Path) -> PromptDataset:
    return dataset(tmp_path, ROWS)


def length_of(request: GenerationRequest) -> int:
    _, group, sample, *_ = request.request_id.split("-")
    return LONG if int(group) % 3 == 0 and sample == "0" else 4


class Slow(FakeTimeEngine):
    """Long responses alone are slow: what ended before them is known everywhere, also on a busy machine."""

    def step(self) -> list[Completion]:
        if all(length_of(row.request) == LONG for row in self._running.values()):
            time.sleep(0.05)
        return super().step()


def engine() -> FakeTimeEngine:
    return Slow(length_of=length_of)


def rules(beyond: str = "wait", bound: int = 2, rate: float = 1.0) -> AsyncTrainingConfig:
    return AsyncTrainingConfig(over_sample_rate=rate, max_staleness=bound, beyond=beyond)


class Steps:
    """The loop around a collector: a batch, a change of the weights, and what was trained."""

    def __init__(self, made: Any, fleet: Any, version: int = 0) -> None:
        self.made, self.fleet, self.version = made, fleet, version
        self.groups: list[list[int]] = []
        self.ages: list[int] = []
        self.metrics: dict[str, float] = {}
        self.responses: dict[tuple[int, int], list[int]] = {}
        if version:
            fleet.load(version)
        made.weights_changed(version)

    def make(self, count: int = 1, *, train: bool = True) -> Steps:
        for _ in range(count):
            rollouts, pending = self.made.next_batch(self.version + 1)
            pending.wait()
            rollouts.check()
            pending.result()
            self.groups.append(rollouts.group_B[::N].tolist())
            versions = rollouts.weight_version_T.split(rollouts.response_length_B.tolist())
            self.ages += [self.version - int(each.min()) for each in versions]
            for row, ids in enumerate(rollouts.response_ids_T.split(rollouts.response_length_B.tolist())):
                self.responses[int(rollouts.group_B[row]), row % N] = ids.tolist()
            self.metrics = dict(self.made.metrics())
            assert self.made.metrics() == self.metrics  # reading them changes nothing
            if train:
                self.version += 1
                self.made.trained()
                self.fleet.load(self.version)
                self.made.weights_changed(self.version)
        return self

    @property
    def trained(self) -> list[int]:
        return [group for groups in self.groups for group in groups]


def expected(group: int, sample: int) -> list[int]:
    length = LONG if group % 3 == 0 and sample == 0 else 4
    return tokens_of(request_seed(1, "train", group, sample, 0), length).tolist()


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_every_group_is_trained_once_in_whole_and_none_too_old(data: PromptDataset, bound: int) -> None:
    asynchronous = rules(bound=bound)
    with collector(data, engines=[engine()], asynchronous=asynchronous, total_steps=6) as (made, fleet):
        run = Steps(made, fleet).make(6)
        assert sorted(run.trained) == list(range(ROWS))  # also at the end: no step is left for more
        assert 0 < max(run.ages) <= bound and min(run.ages) == 0
        assert run.responses == {(g, s): expected(g, s) for g in range(ROWS) for s in range(N)}
        assert made.state_dict()["ledger"]["used"] == ROWS and made.state_dict()["returned"] == []
        assert fleet.left == {}
        assert run.metrics["async/running_groups"] == run.metrics["async/ended_groups"] == 0


def test_a_step_does_not_wait_for_the_longest(data: PromptDataset) -> None:
    """Steps of the engine until the first batch: the long responses go on with the next."""
    with collector(data, engines=[engine()]) as (made, fleet):
        Steps(made, fleet).make()
        synchronous = fleet.engines[0].fake.num_steps
    with collector(data, engines=[engine()], asynchronous=rules()) as (made, fleet):
        run = Steps(made, fleet).make()
        assert synchronous == LONG and fleet.engines[0].fake.num_steps < LONG
        assert run.groups == [[1, 2, 4, 5]] and run.metrics["async/running_groups"] >= 3
        mixed = [run.make().metrics["async/mixed_fraction"] for _ in range(2)]
        assert {0, 3, 6} <= {*run.groups[1], *run.groups[2]} and max(mixed) > 0 and max(run.ages) in (1, 2)


def test_continue_trains_what_ends_however_old(data: PromptDataset) -> None:
    asynchronous = rules("continue", bound=1)
    with collector(data, engines=[engine()], asynchronous=asynchronous, total_steps=6) as (made, fleet):
        run = Steps(made, fleet).make(6)
        assert sorted(run.trained) == list(range(ROWS)) and max(run.ages) > 1


def test_drop_aborts_and_counts_what_is_too_old(data: PromptDataset) -> None:
    asynchronous = rules("drop", bound=1, rate=2)
    with collector(data, engines=[engine()], asynchronous=asynchronous) as (made, fleet):
        run = Steps(made, fleet).make(2)
        told = [run.make().metrics for _ in range(2)]
        ledger = made.state_dict()["ledger"]
        assert max(run.ages) == 1
        assert ledger["stale"] == sum(each["async/dropped_groups"] for each in told) > 0
        assert sum(each["async/dropped_tokens"] for each in told) > 0
        gone = set(run.trained) | {group for _, group in made.state_dict()["returned"]}
        assert ledger["used"] == len(run.trained) == len(set(run.trained))
        assert len(set(range(made.loader.draws)) - gone) == ledger["stale"]


@pytest.mark.parametrize("beyond", ["wait", "continue", "drop"])
def test_what_is_trained_is_as_long_as_what_is_drawn_unless_it_may_be_dropped(beyond: str, tmp_path: Path) -> None:
    """Not only at the end, where everything drawn is trained: also in the middle of a run. Kolmogorov-Smirnov."""
    first, steps, rows = 5, 45, 300

    def drawn(group: int, sample: int) -> int:
        return int(min(64.0, np.random.default_rng((group, sample)).lognormal(1.5, 1.0)) + 1)

    def length_of(request: GenerationRequest) -> int:
        _, group, sample, *_ = request.request_id.split("-")
        return drawn(int(group), int(sample))

    class Paced(FakeTimeEngine):
        """Not faster than the groups are taken."""

        def step(self) -> list[Completion]:
            time.sleep(0.003)
            return super().step()

    engines = [Paced(length_of=length_of)]
    asynchronous = rules(beyond, bound=1, rate=2)
    with collector(dataset(tmp_path, rows), engines=engines, asynchronous=asynchronous) as (made, fleet):
        run = Steps(made, fleet).make(steps)
    trained = [len(run.responses[group, n]) for groups in run.groups[first:] for group in groups for n in range(N)]
    all_drawn = [drawn(group, n) for group in range(rows) for n in range(N)]
    gap = max(abs(np.mean(np.array(trained) <= at) - np.mean(np.array(all_drawn) <= at)) for at in range(66))
    scaled = gap / (1 / len(trained) + 1 / len(all_drawn)) ** 0.5  # above 1.36 in one of 20 equal pairs
    share = np.mean(trained) / np.mean(all_drawn)
    assert share < 0.85 if beyond == "drop" else (0.9 < share < 1.1 and scaled < 1.36), (share, scaled)


def test_groups_without_a_signal_are_replaced(data: PromptDataset) -> None:
    algorithm = AlgorithmConfig(filter_groups=FilterGroupsConfig(enable=True))
    options = {"engines": [engine()], "asynchronous": rules(), "algorithm": algorithm, "verdict": teaches}
    with collector(data, **options) as (made, fleet):
        run = Steps(made, fleet).make(3)
        assert all(group % 3 for group in run.trained) and len(run.trained) == 12
        ledger = made.state_dict()["ledger"]
        assert ledger["used"] == 12 and ledger["dropped"] > 0
        assert run.metrics["filter_groups/num_drawn"] >= 4


def test_a_grader_that_finds_no_signal_at_all_ends_the_run_with_the_reason(data: PromptDataset) -> None:
    algorithm = AlgorithmConfig(filter_groups=FilterGroupsConfig(enable=True, max_num_gen_batches=3))
    options = {"asynchronous": rules(), "algorithm": algorithm, "verdict": lambda position, nth: 1.0}
    gives_up = pytest.raises(RunStopped, match="0 groups with a signal")
    with collector(data, engines=[engine()], **options) as (made, fleet), gives_up:
        Steps(made, fleet).make()


def _ignoring_the_end(made: Any) -> None:
    with suppress(RolloutError):
        made.next_batch(1)


def nothing_is_left(fleet: Fleet, within_s: float = 20.0) -> bool:
    """What was aborted leaves its engine a step later."""
    give_up = time.monotonic() + within_s
    while fleet.router.snapshot() and time.monotonic() < give_up:
        time.sleep(0.01)
    return fleet.router.snapshot() == {}


def test_races_leave_their_places_to_others(data: PromptDataset) -> None:
    """What ran in vain no longer counts as running: as many groups are begun, and each is trained once."""

    class Paced(FakeTimeEngine):
        def step(self) -> list[Completion]:
            time.sleep(0.01)
            return super().step()

    engines = [Paced(length_of=lambda request: 60 if request.request_id.split("-")[2] == "0" else 4)]
    with collector(data, engines=engines, asynchronous=rules(), n_redundant=1, total_steps=6) as (made, fleet):
        run = Steps(made, fleet).make(6)
        assert sorted(run.trained) == list(range(ROWS)) and nothing_is_left(fleet)
        assert {len(ids) for ids in run.responses.values()} == {4}
        assert made._source._order.num_sampling == len(made._source._order.sampling) == 0
        assert run.metrics["redundancy/discarded_episodes"] == 4


def test_what_begins_as_an_episode_ends_is_no_part_of_it(data: PromptDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    with collector(data, engines=[engine()], asynchronous=rules(), total_steps=6) as (made, fleet):
        draw = made.loader.draw
        monkeypatch.setattr(made.loader, "draw", lambda count: names.append(EPISODE.get()) or draw(count))
        Steps(made, fleet).make(6)
    assert len(names) > 2 and set(names) == {""}


def test_groups_that_wait_for_their_grader_count_as_begun(data: PromptDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grader that does not answer: no more groups are drawn than may be under way, also with `continue`."""
    monkeypatch.setattr(Rewards, "submit", lambda self, calls: [Future() for _ in calls])
    algorithm = AlgorithmConfig(filter_groups=FilterGroupsConfig(enable=True))
    options = {"engines": [engine()], "asynchronous": rules("continue", rate=0.5), "algorithm": algorithm}
    with collector(data, **options) as (made, _):
        threading.Thread(target=_ignoring_the_end, args=(made,), daemon=True).start()
        time.sleep(1.5)
        assert 4 + 2 <= made.loader.draws <= 10  # some for places that others left before the last of their group


def test_an_error_of_the_data_is_the_steps(data: PromptDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the next prompt is drawn because a group was of no use."""
    algorithm = AlgorithmConfig(filter_groups=FilterGroupsConfig(enable=True))
    options = {"engines": [engine()], "asynchronous": rules(), "algorithm": algorithm, "verdict": lambda p, nth: 1.0}
    with collector(data, **options) as (made, _):
        draw = made.loader.draw

        def failing(count: int) -> list[Prompt]:
            if made.loader.draws > 8:
                raise OSError("the disk is gone")
            return draw(count)

        monkeypatch.setattr(made.loader, "draw", failing)
        with pytest.raises(OSError, match="the disk is gone"):
            made.next_batch(1)


def test_a_tool_that_blocks_the_loop_is_named(data: PromptDataset) -> None:
    """`time.sleep` in an agent loop, where it should have been asyncio's."""
    now = threading.Event()

    class Blocks(SingleTurn):
        async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
            episode = await super().run(prompt, sample, ask)
            if now.is_set():
                now.clear()
                time.sleep(1.5)
            return episode

    with collector(data, engines=[engine()], runner=Blocks(), asynchronous=rules()) as (made, _):
        made.next_batch(1)
        made._patience_s = 0.2
        now.set()
        threading.Thread(target=_ignoring_the_end, args=(made,), daemon=True).start()
        time.sleep(0.3)
        with pytest.raises(RuntimeError, match=r"(?s)blocked the event loop.*time.sleep\(1.5\)"):
            made.trained()


# ---- resume


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state))


def test_a_resumed_run_goes_on_from_the_tokens_of_what_was_under_way(data: PromptDataset, tmp_path: Path) -> None:
    with collector(data, engines=[engine()], asynchronous=rules(), total_steps=6) as (made, fleet):
        first = Steps(made, fleet).make(2)
        state = through_json(made.state_dict())
        made.save_under_way(tmp_path)
        before = fleet.engines[0].fake.num_sampled
    found = partial_responses.read(tmp_path)
    number_kept = sum(len(one) for samples in found.values() for one in samples.values())
    assert number_kept == before - sum(map(len, first.responses.values())) > 0
    with collector(data, engines=[engine()], asynchronous=rules(), total_steps=6) as (made, fleet):
        made.load_state_dict(state, tmp_path)
        run = Steps(made, fleet, version=2).make(4)
        assert sorted(first.trained + run.trained) == list(range(ROWS))
        assert first.responses | run.responses == {(g, s): expected(g, s) for g in range(ROWS) for s in range(N)}
        sampled_again = fleet.engines[0].fake.num_sampled
        assert sampled_again == sum(map(len, run.responses.values())) - number_kept
        assert made.state_dict()["ledger"]["used"] == ROWS
        assert max(run.ages) <= 2  # a kept group is as old as its first token


def test_without_the_file_of_tokens_groups_begin_anew(data: PromptDataset, tmp_path: Path) -> None:
    with collector(data, engines=[engine()], asynchronous=rules(), total_steps=6) as (made, fleet):
        first = Steps(made, fleet).make(2)
        state = through_json(made.state_dict())
    with collector(data, engines=[engine()], asynchronous=rules(), total_steps=6) as (made, fleet):
        made.load_state_dict(state, tmp_path)
        run = Steps(made, fleet, version=2).make(4)
        assert sorted(first.trained + run.trained) == list(range(ROWS))
        assert min(run.ages) == 0


def test_a_batch_that_was_taken_and_not_trained_comes_again(data: PromptDataset, tmp_path: Path) -> None:
    with collector(data, engines=[engine()], asynchronous=rules(), total_steps=6) as (made, fleet):
        first = Steps(made, fleet).make()
        taken = Steps(made, fleet, version=1).make(train=False)  # the driver fails before the update
        state = through_json(made.state_dict())
        made.save_under_way(tmp_path)
    assert state["ledger"]["used"] == 4
    with collector(data, engines=[engine()], asynchronous=rules(), total_steps=6) as (made, fleet):
        made.load_state_dict(state, tmp_path)
        run = Steps(made, fleet, version=1).make(5)
        assert sorted(first.trained + run.trained) == list(range(ROWS))
        assert set(taken.trained) <= set(run.trained)
        assert all(run.responses[name] == ids for name, ids in taken.responses.items())


def test_a_synchronous_run_goes_on_from_an_asynchronous_checkpoint(data: PromptDataset, tmp_path: Path) -> None:
    with collector(data, engines=[engine()], asynchronous=rules(), total_steps=6) as (made, fleet):
        first = Steps(made, fleet).make(2)
        state = through_json(made.state_dict())
    with collector(data, engines=[engine()], total_steps=6) as (made, fleet):
        made.load_state_dict(state)
        run = Steps(made, fleet, version=2).make(4)
        assert sorted(first.trained + run.trained) == list(range(ROWS))


def test_tokens_of_a_checkpoint_come_back_as_they_were(data: PromptDataset, tmp_path: Path) -> None:
    partial_responses.write(tmp_path, {})
    assert partial_responses.read(tmp_path) == {} == partial_responses.read(tmp_path / "nothing")
    with collector(data, engines=[engine()], asynchronous=rules()) as (made, fleet):
        Steps(made, fleet).make(2)
        made.save_under_way(tmp_path)
    for group, samples in partial_responses.read(tmp_path).items():
        for sample, one in samples.items():
            want = expected(group, sample)[: len(one)]
            assert one.token_ids.tolist() == want and one.token_ids.dtype == np.int32
            assert one.log_probs.dtype == np.float32 and one.weight_versions.dtype == np.int32
            assert (one.finish is not None) == (len(one) == len(expected(group, sample)))


# ---- errors


def test_an_error_of_an_episode_that_was_carried_over_is_the_next_steps(data: PromptDataset) -> None:
    class Broken(SingleTurn):
        async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
            episode = await super().run(prompt, sample, ask)
            if prompt.group == 3 and sample == 0:  # a long one
                raise KeyError("my bug")
            return episode

    with collector(data, engines=[engine()], runner=Broken(), asynchronous=rules()) as (made, fleet):
        run = Steps(made, fleet).make()
        with pytest.raises(KeyError, match="my bug"):
            run.make(5)


def test_a_dead_replica_ends_the_step(data: PromptDataset) -> None:
    dying = engine()
    with collector(data, engines=[dying], asynchronous=rules()) as (made, fleet):
        run = Steps(made, fleet).make()
        dying.failure = RuntimeError("power cut")
        with pytest.raises(RolloutError, match="power cut"):
            run.make()


def test_validation_between_two_steps_leaves_what_is_under_way_alone(data: PromptDataset) -> None:
    with collector(data, engines=[engine()], asynchronous=rules(), total_steps=6) as (made, fleet):
        run = Steps(made, fleet).make()
        how = replace(made.how, purpose="val", sampling=SamplingParams(max_tokens=4))
        prompts = read_prompts(data, [0, 1], [0, 1])
        rollouts, pending = made.answer(prompts, how, step=1)
        assert len(rollouts) == N * len(prompts) and len(pending.result()) == len(rollouts)
        run.make(5)
        assert sorted(run.trained) == list(range(ROWS))


def test_many_runs_with_tools_that_take_time_lose_nothing(data: PromptDataset) -> None:
    class WithTool(SingleTurn):
        async def run(self, prompt: Prompt, sample: int, ask: Ask) -> Episode:
            episode = await super().run(prompt, sample, ask)
            await asyncio.sleep(0.001 * (prompt.group % 4))
            return episode

    with collector(data, engines=[engine(), engine()], runner=WithTool(), asynchronous=rules(), total_steps=6) as (
        made,
        fleet,
    ):
        run = Steps(made, fleet).make(6)
        assert sorted(run.trained) == list(range(ROWS))


def test_what_a_step_leaves_is_freed_at_once(data: PromptDataset) -> None:
    """Not when Python's collector comes by: a batch's tokens are gigabytes."""

    def alive() -> list[object]:
        return [each for each in gc.get_objects() if type(each) in (Trail, Collection)]

    gc.collect()
    others = alive()  # of other tests in this process
    gc.disable()
    try:
        with collector(data, engines=[engine()], asynchronous=rules(), total_steps=6) as (made, fleet):
            Steps(made, fleet).make(6)
            left = [each for each in alive() if not any(each is other for other in others)]
    finally:
        gc.enable()
    assert left == []
