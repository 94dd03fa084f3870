"""`RolloutGroup.sample` over both worker groups: in this process, two replicas on Ray, one of two ranks on Ray."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from verl_like.cluster.launch import RaySession, connect
from verl_like.cluster.local import LocalWorkerGroup
from verl_like.cluster.ray_group import RayWorkerGroup
from verl_like.cluster.worker_group import GroupStopped, WorkerDied, WorkerError, WorkerTimeout
from verl_like.config import PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.kit.bench.fake_time import tokens_of
from verl_like.rollout.client import RolloutClient
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, RolloutError, SamplingParams
from verl_like.trainer.replicas import RolloutGroup

TOY = f"{__name__.rpartition('.')[0] + '.' if '.' in __name__ else ''}toy_replica:ToyReplica"
ENDLESS = 10**7
KINDS = {"local": (1, 1), "ray": (2, 1), "tensor_parallel": (2, 2)}  # ranks, ranks of a replica
pytestmark = pytest.mark.timeout(180)


def request(i: int, tokens: int = 20, **fields: Any) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=tokens)
    return GenerationRequest(request_id=f"r{i}", prompt_ids=[1, 2], sampling=sampling, seed=i, **fields)


def read_all(
    futures: Sequence[Future[Completion]], on_response: Callable[[int, Completion], None] = lambda row, completion: None
) -> Future[list[Completion]]:
    """All completions, in the order of their futures, or the first error, the reader's own too."""
    whole: Future[list[Completion]] = Future()
    left, lock = set(range(len(futures))), threading.Lock()

    def ended(row: int, future: Future[Completion]) -> None:
        with lock:
            if whole.done():
                return
            try:
                on_response(row, future.result())
            except BaseException as error:
                failure: BaseException | None = error
            else:
                failure = None
                left.discard(row)
            complete = not left
        if failure is not None:
            whole.set_exception(failure)
        elif complete:
            whole.set_result([each.result() for each in futures])

    if not futures:
        whole.set_result([])
    for row, future in enumerate(futures):
        future.add_done_callback(lambda done, row=row: ended(row, done))
    return whole


def right(completions: Sequence[Completion], seeds: Sequence[int], tokens: int = 20) -> bool:
    return [c.token_ids for c in completions] == [tokens_of(seed, tokens).tolist() for seed in seeds]


def policy_of(group: Any, ranks: int, ranks_each: int) -> RolloutGroup:
    config = PPOConfig()
    config.critic.enable = False
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = ranks_each
    plan = dataclasses.replace(BatchPlan.build(config, ranks, 1024), tensor_parallel_size=ranks_each)
    return RolloutGroup(group, plan, timeout_s=60)


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    with connect(num_cpus=4, object_store_memory=200 * 1024**2) as ray_session:
        yield ray_session


@pytest.fixture(scope="module")
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """The group of a kind, which its tests share unless one has stopped it."""
    made: dict[str, tuple[Any, RolloutGroup]] = {}

    def end() -> None:
        for group, policy in made.values():
            policy.close()
            group.shutdown()
        made.clear()

    def make(kind: str) -> tuple[Any, RolloutGroup]:
        if kind not in made or _stopped(made[kind][0]):
            end()
            ranks, ranks_each = KINDS[kind]
            spec = {"ranks_each": ranks_each}
            if kind == "local":
                group: Any = LocalWorkerGroup(TOY, spec)
            else:
                session, room = request.getfixturevalue("session"), request.getfixturevalue("room")
                logs: Path = tmp_path_factory.mktemp("logs")
                group = RayWorkerGroup(TOY, spec, allocation=room, run_id=session.run_id, log_dir=logs)
            made[kind] = group, policy_of(group, ranks, ranks_each)
        return made[kind]

    yield make
    end()
    left = [thread.name for thread in threading.enumerate() if "rollout engine" in thread.name or "link" in thread.name]
    assert not left, f"threads are left: {left}"


def _stopped(group: Any) -> bool:
    return (group._stopped_by if isinstance(group, LocalWorkerGroup) else group.stopped_by) is not None


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def both(kind: str, start: Callable[..., Any]) -> tuple[Any, RolloutGroup]:
    return start(kind)


Both = tuple[Any, RolloutGroup]


def facts(group: Any, name: str) -> list[Any]:
    return [each[name] for each in group.call_all("facts").wait(30)]


def sampled_again(group: Any, policy: RolloutGroup, first: int = 900) -> bool:
    """Whether the replicas hold nothing, and go on."""
    assert all(facts(group, "paused")) and not any(facts(group, "pending"))
    seeds = range(first, first + 8)
    return right(policy.sample(lambda client: read_all([client.submit(request(i)) for i in seeds])), seeds)


def test_rounds_of_requests(both: Both) -> None:
    group, policy = both
    for part in range(3):
        seeds = range(100 * part, 100 * part + 40)
        before = facts(group, "sampled")
        done = policy.sample(
            lambda client, seeds=seeds: read_all([client.submit(request(i, session=f"s{i // 4}")) for i in seeds])
        )
        assert right(done, seeds) and all(facts(group, "paused"))
        added = [after - old for after, old in zip(facts(group, "sampled"), before, strict=True)]
        ranks_each = policy.plan.tensor_parallel_size
        assert added == [40 * 20 * ranks_each // len(added)] * len(added)  # shared evenly; by all ranks of a replica


def test_what_is_submitted_together_begins_with_the_same_step(both: Both) -> None:
    group, policy = both
    before = facts(group, "steps")
    policy.sample(lambda client: read_all([client.submit(request(i)) for i in range(64)]))
    assert [after - old for after, old in zip(facts(group, "steps"), before, strict=True)] == [20] * len(before)


def test_more_is_submitted_as_responses_end(both: Both) -> None:
    """Episodes of three turns, each turn from the callback of the one before it."""
    group, policy = both
    ended: Future[list[int]] = Future()
    lengths: list[int] = []
    lock = threading.Lock()

    def work(client: RolloutClient) -> Future[list[int]]:
        def turn(episode: int, number: int, done: Future[Completion] | None = None) -> None:
            if done is not None:
                with lock:
                    lengths.append(len(done.result().sampled))
                    if len(lengths) == 30:
                        ended.set_result(lengths)
            if number < 3:
                asked = request(10 * episode + number, 5 + number, session=f"e{episode}", turn=number)
                client.submit(asked).add_done_callback(lambda future: turn(episode, number + 1, future))

        for episode in range(10):
            turn(episode, 0)
        return ended

    assert sorted(policy.sample(work)) == [5] * 10 + [6] * 10 + [7] * 10
    assert sampled_again(group, policy)


def test_a_result_without_any_request(both: Both) -> None:
    group, policy = both
    nothing: Future[str] = Future()
    nothing.set_result("nothing")
    assert policy.sample(lambda client: nothing) == "nothing"
    assert policy.sample(lambda client: read_all([])) == []
    assert sampled_again(group, policy)


def test_work_that_fails_leaves_nothing_behind(both: Both) -> None:
    group, policy = both
    clients: list[RolloutClient] = []
    futures: list[Future[Completion]] = []

    def at_once(client: RolloutClient) -> Future[None]:
        clients.append(client)
        futures.append(client.submit(request(1)))
        raise KeyError("at once")

    with pytest.raises(KeyError, match="at once"):
        policy.sample(at_once)
    assert futures[0].result(0).finish_reason == "abort"

    def later(client: RolloutClient) -> Future[list[Completion]]:
        clients.append(client)
        futures[:] = [client.submit(request(i, 30 if i == 5 else ENDLESS)) for i in range(10)]
        return read_all(futures, fail)

    def fail(row: int, completion: Completion) -> None:
        raise ValueError(f"row {row} is not to my taste")

    with pytest.raises(ValueError, match="row 5 is not to my taste"):
        policy.sample(later)
    assert [future.result(0).finish_reason for i, future in enumerate(futures) if i != 5] == ["abort"] * 9
    for client in clients:
        with pytest.raises(RolloutError, match="the work it belongs to has failed"):
            client.submit(request(2))
    assert sampled_again(group, policy, first=0)  # the same ids


def test_a_refused_request_fails_the_work_alone(both: Both) -> None:
    group, policy = both
    with pytest.raises(ValueError, match="does not fit"):
        policy.sample(lambda client: read_all([client.submit(request(i, 10**9 if i else ENDLESS)) for i in range(3)]))
    assert sampled_again(group, policy)


def test_what_is_still_pending_goes_on_in_the_next_call(both: Both) -> None:
    group, policy = both
    long: list[Future[Completion]] = []
    length = 100_000 // policy.plan.tensor_parallel_size**6  # with two ranks a step takes longer

    def work(client: RolloutClient) -> Future[Completion]:
        long.append(client.submit(request(1, length)))
        return client.submit(request(2, 10))

    assert right([policy.sample(work)], [2], 10)
    assert not long[0].done() and sum(facts(group, "pending")) == 1
    group.call_all("load").wait(30)  # as between two training steps
    assert right([policy.sample(lambda client: long[0])], [1], length)
    assert long[0].result().sampled.weight_versions[-1] == 1
    assert sampled_again(group, policy)


def test_a_broken_step_is_told_with_its_cause(both: Both) -> None:
    group, policy = both
    pending: list[Future[Completion]] = []

    def work(client: RolloutClient) -> Future[list[Completion]]:
        pending.extend(client.submit(request(i, ENDLESS)) for i in range(4))
        never: Future[list[Completion]] = Future()  # who works here does not even look
        return never

    group.call_all("break_step", group.world_size - 1).wait(30)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"failed in rollout.serve\(\): .*broken step"):
        policy.sample(work)
    assert time.monotonic() - begun < 40
    for future in pending:
        assert isinstance(future.exception(0), RolloutError)
    with pytest.raises(GroupStopped):
        policy.sample(work)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_it_serves(both: Both, rank: int) -> None:
    group, policy = both
    if group.world_size == 1:
        pytest.skip("the rank is this process")
    group.call_all("die_at_step", rank).wait(30)
    futures: list[Future[Completion]] = []

    def work(client: RolloutClient) -> Future[list[Completion]]:
        futures.extend(client.submit(request(i, ENDLESS)) for i in range(4))
        return read_all(futures)

    with pytest.raises(WorkerDied, match=rf"worker rank {rank} of 2: its process died during rollout.serve\(\)"):
        policy.sample(work)
    errors = [future.exception(0) for future in futures]
    assert all(isinstance(error, RolloutError) for error in errors if error) and any(errors)
    others = [future.result(0) for future, error in zip(futures, errors, strict=True) if error is None]
    assert all(completion.finish_reason == "abort" for completion in others)  # of the replica that lived on


def test_work_without_end_meets_the_time_limit(both: Both) -> None:
    group, policy = both
    if group.world_size == 1:
        pytest.skip("calls in this process have no limit")
    policy.timeout_s = 3.0
    with pytest.raises(WorkerTimeout, match=r"serve\(\) was not answered within 3 s .*by worker rank\(s\) 0, 1 of 2"):
        policy.sample(lambda client: client.submit(request(1, 10**8 - 2)))
