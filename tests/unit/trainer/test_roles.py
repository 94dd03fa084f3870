"""The driver's side of a call: who gets which rows, and how the answers come together."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from tests.unit.algorithms.builders import rollouts
from verl_like.algorithms.mismatch import finish
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.batch import Evaluated, Experience, Metric
from verl_like.config import ActorConfig, PolicyLossConfig, PPOConfig, SampleWeightConfig, TrainerConfig
from verl_like.config.actor import RouterConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.kit.bench.fake_time import FakeTimeEngine, FakeTimeRollout, tokens_of
from verl_like.models.prefix_tree import beginnings
from verl_like.rollout.client import RolloutClient
from verl_like.rollout.link import LinkServer
from verl_like.rollout.rollout_engine import Completion, GenerationRequest, SamplingParams, request_seed
from verl_like.trainer.dispatch import RowBalance
from verl_like.trainer.replicas import RolloutGroup
from verl_like.trainer.roles import ActorHandle, CriticHandle, UpdateRules, average_steps, handle_options
from verl_like.trainer.weights import Weights
from verl_like.weight_sync.header import Wanted
from verl_like.weight_sync.verdict import Receipt, Sent, WeightSyncError


class Done:
    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> list[Any]:
        return self.values


class Failed(Done):
    def wait(self, timeout: float | None = None) -> list[Any]:
        raise OSError("no header")


class FakeGroup:
    """Keeps what each rank was given, and lets `answer(method, rank, *args)` reply."""

    def __init__(self, world_size: int, answer: Any) -> None:
        self._world_size, self.answer = world_size, answer
        self.given: list[tuple[str, list[tuple[Any, ...]]]] = []

    @property
    def world_size(self) -> int:
        return self._world_size

    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any] | None = None) -> Done:
        assert len(per_rank) == self._world_size
        self.given.append((method, list(per_rank)))
        return Done([self.answer(method, rank, *args) for rank, args in enumerate(per_rank)])

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> Done:
        return self.call(method, [args] * self._world_size)

    def shutdown(self) -> None: ...


def plan(world_size: int, tensor_parallel: int = 1, ulysses: int = 1) -> BatchPlan:
    config = PPOConfig()
    config.data.train_batch_size = 4
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 4
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = tensor_parallel
    config.actor_rollout_ref.actor.ulysses_sequence_parallel_size = ulysses
    config.critic.ulysses_sequence_parallel_size = ulysses
    config.critic.ppo_mini_batch_size = 4
    return BatchPlan.build(config, world_size, 100)


def generate(policy: RolloutGroup, lengths: list[int], limits: list[int], step: int = 1) -> list[Completion]:
    """Two responses to each prompt, of so many tokens; they are submitted together."""
    futures: list[Future[Completion]] = []
    done = Future[None]()

    def work(client: RolloutClient) -> Future[None]:
        left = threading.Semaphore(len(limits) - 1)
        for row, limit in enumerate(limits):
            prompt = row // 2
            request = GenerationRequest(
                request_id=f"{step}-{prompt + 100}-{row % 2}",
                prompt_ids=[prompt + 1] * lengths[prompt],
                sampling=SamplingParams(max_tokens=limit),
                seed=request_seed(7, step, prompt, row % 2),
                session=str(prompt),
            )
            futures.append(client.submit(request))
            futures[-1].add_done_callback(lambda _: left.acquire(blocking=False) or done.set_result(None))
        return done

    policy.sample(work)
    return [future.result(0) for future in futures]


class Noting(FakeTimeEngine):
    """Responses as long as allowed. Notes what it was given, in which order."""

    def __init__(self) -> None:
        super().__init__(length_of=lambda request: 10**9)
        self.given: list[GenerationRequest] = []

    def add(self, request: GenerationRequest) -> None:
        super().add(request)
        self.given.append(request)


class ServedGroup(FakeGroup):
    """Ranks in threads; the first one of each replica serves an engine with fake time."""

    def __init__(self, world_size: int, ranks_each: int = 1) -> None:
        super().__init__(world_size, self._run)
        self.engines = [Noting() if rank % ranks_each == 0 else None for rank in range(world_size)]
        self._rollouts = [None if engine is None else FakeTimeRollout(engine) for engine in self.engines]
        self._links = [None if rollout is None else LinkServer(rollout, "127.0.0.1") for rollout in self._rollouts]
        self._threads = ThreadPoolExecutor(world_size)

    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any] | None = None) -> Done:
        calls = [self._threads.submit(self._run, method, rank, *args) for rank, args in enumerate(per_rank)]
        return Done([call.result(60) for call in calls])

    def _run(self, method: str, rank: int, *args: Any) -> Any:
        link = self._links[rank]
        if method == "rollout.open_link":
            return None if link is None else (link.address, link.authkey)
        assert method == "rollout.serve"
        return None if link is None else link.serve(*args)

    def shutdown(self) -> None:
        for link, rollout in zip(self._links, self._rollouts, strict=True):
            if link is not None and rollout is not None:
                link.close()
                rollout.shutdown()
        self._threads.shutdown()


@contextmanager
def served(world_size: int, ranks_each: int = 1, **options: Any) -> Iterator[tuple[ServedGroup, RolloutGroup]]:
    group = ServedGroup(world_size, ranks_each)
    policy = RolloutGroup(group, plan(world_size, ranks_each), timeout_s=60, **options)
    yield group, policy
    policy.close()
    group.shutdown()


def given(group: ServedGroup) -> list[list[str]]:
    """Request ids by rank, in the order in which they were taken up."""
    return [[request.request_id for request in engine.given] if engine else [] for engine in group.engines]


@pytest.mark.parametrize(("world_size", "tensor_parallel"), [(1, 1), (3, 1), (4, 2)])
def test_a_prompts_responses_share_a_replica(world_size: int, tensor_parallel: int) -> None:
    limits = [30, 4, 3, 30, 4, 3, 2, 1]
    with served(world_size, tensor_parallel) as (group, policy):
        done = generate(policy, [3, 1, 2, 5], limits)
        at = given(group)
    for row, completion in enumerate(done):
        assert completion.token_ids == tokens_of(request_seed(7, 1, row // 2, row % 2), limits[row]).tolist()
    everything = [name for names in at for name in names]
    assert sorted(everything) == sorted(f"1-{group}-{sample}" for group in range(100, 104) for sample in range(2))
    assert all(bool(names) == (rank % tensor_parallel == 0) for rank, names in enumerate(at))
    for names in at:  # in the order in which they were asked for
        assert names == sorted(names) and {f"{name[:-1]}{1 - int(name[-1])}" for name in names} == set(names)


def test_no_more_requests_run_in_a_replica_than_allowed() -> None:
    with served(1, max_running_requests=3) as (group, policy):
        generate(policy, [3, 1, 2, 5], [30, 4, 3, 30, 4, 3, 2, 1])
        assert group.engines[0] is not None and group.engines[0].most_running == 3
    with served(1) as (group, policy):
        generate(policy, [3, 1, 2, 5], [30, 4, 3, 30, 4, 3, 2, 1])
        assert group.engines[0] is not None and group.engines[0].most_running == 8


def test_replicas_and_order_do_not_depend_on_what_was_sampled_before() -> None:
    """A resumed run has not seen the lengths of the steps before it."""

    def sample(policy: RolloutGroup, step: int) -> None:
        generate(policy, [1 + (7 * i + step) % 11 for i in range(12)], [2 + (5 * i) % 17 for i in range(24)], step)

    with served(3) as (whole, policy):
        sample(policy, 1)
        before = [len(names) for names in given(whole)]
        sample(policy, 2)
        second = [names[count:] for names, count in zip(given(whole), before, strict=True)]
    with served(3) as (resumed, policy):
        sample(policy, 2)
        assert given(resumed) == second
    assert all(len(names) >= 4 for names in second)


def test_nothing_is_sampled_from_weights_that_are_not_the_actors() -> None:
    """From an update, or a checkpoint that was read, to the next sync."""
    pool = FakeGroup(1, syncs)
    weights = Weights(pool, pool, timeout_s=1)
    actor = ActorHandle(FakeGroup(1, lambda *_: []), plan(1), balance=True, timeout_s=1, on_change=weights.changed)
    rules = UpdateRules(prompts_per_mini_batch=4, epochs=1, shuffle=False, seed=1, max_response_length=4)
    with served(1, has_weights=lambda: weights.version is not None) as (_, rollout):
        for change in (None, lambda: actor.update(experience(4, 1), rules, 1), lambda: actor.load("folder")):
            if change is not None:
                change()
            with pytest.raises(RuntimeError, match="sync before sampling"):
                generate(rollout, [3], [2, 2])
            assert weights.sync(7) is not None and weights.sync(7) is None
            assert len(generate(rollout, [3], [2, 2])) == 2


def syncs(method: str, rank: int, *_: Any) -> Wanted | Sent | Receipt | None:
    """What a process with actor and engine answers."""
    wanted = Wanted(dtype=torch.float32, keeps_adapters=False, tokenizer_size=1, max_model_len=1, held=None)
    sent = Sent(version=7, form="merged", mark="a", num_changed=None, seconds=0.5)
    receipt = Receipt(mark="a", seconds=1.0 + rank)
    return {"weights.wanted": wanted, "weights.send": sent, "weights.receive": receipt}.get(method)


def test_one_process_goes_the_way_of_two_pools() -> None:
    """It is asked, sends, receives, and is judged; only nobody listens or joins."""
    pool = FakeGroup(2, syncs)
    report = Weights(pool, pool, timeout_s=1).sync(7)
    assert report is not None and report.seconds == 0.5 + 2.0
    assert [method for method, _ in pool.given] == ["weights.wanted", "weights.send", "weights.receive"]


def test_engines_that_hold_something_else_are_unloaded() -> None:
    pool = FakeGroup(
        2, lambda method, rank, *_: Receipt(mark="b", seconds=1.0) if "receive" in method else syncs(method, rank)
    )
    weights = Weights(pool, pool, timeout_s=1)
    with pytest.raises(WeightSyncError, match=r"rollout engines hold \['b', 'b'\]"):
        weights.sync(7)
    assert pool.given[-1][0] == "weights.unload" and weights.version is None


def test_a_process_that_cannot_send_is_not_asked_to_receive() -> None:
    """Its rank leaves a collective in which the others wait, and must not meet them in the next one."""

    class Leaves(FakeGroup):
        def call_all(self, method: str, *args: Any, **kwargs: Any) -> Done:
            return (
                Failed([]) if super().call_all(method, *args) and method == "weights.send" else Done([syncs(method, 0)])
            )

    pool = Leaves(1, syncs)
    with pytest.raises(OSError, match="no header"):
        Weights(pool, pool, timeout_s=1).sync(7)
    assert pool.given[-1][0] == "weights.send"


def test_values_come_back_to_their_rows() -> None:
    def values(method: str, rank: int, batch: Any) -> Evaluated:
        return Evaluated(response_length_B=batch.response_length_B, values_BR=batch.response_ids_BR.float() + 0.5)

    batch = rollouts((3, 1, 4, 2, 4, 1, 2, 3), [0, 0, 1, 1, 2, 2, 3, 3])
    critic = CriticHandle(FakeGroup(2, values), plan(2), balance=True, timeout_s=1)
    found = critic.values(batch).values_BR
    inside_BR = torch.arange(batch.response_ids_BR.shape[1])[None, :] < batch.response_length_B[:, None]
    assert found is not None and torch.equal(found[inside_BR], batch.response_ids_BR[inside_BR] + 0.5)


def experience(num_groups: int, n: int) -> Experience:
    rows = num_groups * n
    lengths = torch.tensor([1 + i % 3 for i in range(rows)])
    mask = torch.arange(3)[None, :] < lengths[:, None]
    return Experience(
        prompt_ids_BP=torch.ones(rows, 1, dtype=torch.int32),
        prompt_length_B=torch.ones(rows, dtype=torch.long),
        response_ids_BR=mask.int(),
        response_length_B=lengths,
        response_mask_BR=mask,
        group_B=torch.arange(rows) // n,
        advantages_BR=mask.float(),
    )


def test_update_cuts_minibatches_before_it_balances() -> None:
    def train(method: str, rank: int, minibatches: list[Any]) -> list[dict[str, Metric]]:
        return [
            {"rows": Metric(value=len(rows), reduction="sum"), "rank": Metric(value=rank, reduction="max")}
            for rows, _ in minibatches
        ]

    group = FakeGroup(2, train)
    rules = UpdateRules(prompts_per_mini_batch=2, epochs=2, shuffle=False, seed=1, max_response_length=3)
    metrics = ActorHandle(group, plan(2), balance=True, timeout_s=1).update(experience(4, 3), rules, 1)
    assert metrics == {"rows": 6.0, "rank": 1.0}
    ((method, per_rank),) = group.given
    assert method == "actor.update"
    for step in range(4):  # two mini-batches in each of two epochs
        parts = [per_rank[rank][0][step] for rank in range(2)]
        groups = sorted(g for rows, _ in parts for g in rows.group_B.tolist())
        expected = [0, 0, 0, 1, 1, 1] if step % 2 == 0 else [2, 2, 2, 3, 3, 3]
        assert groups == expected
        tokens = sum(int(rows.response_mask_BR.sum()) for rows, _ in parts)
        assert {(d.num_tokens, d.num_sequences) for _, d in parts} == {(tokens, 6)}


def minibatches_given(actor: ActorConfig, world_size: int, rows: Experience, step: int = 1) -> list[list[Any]]:
    """Per optimizer step, what each rank was given: (rows, denominators)."""

    def train(method: str, rank: int, minibatches: list[Any]) -> list[dict[str, Metric]]:
        return [{"rows": Metric(value=len(part), reduction="sum")} for part, _ in minibatches]

    group = FakeGroup(world_size, train)
    rules = UpdateRules(prompts_per_mini_batch=2, epochs=2, shuffle=False, seed=1, max_response_length=3, actor=actor)
    ActorHandle(group, plan(world_size), balance=True, timeout_s=1).update(rows, rules, step)
    ((_, per_rank),) = group.given
    return [list(parts) for parts in zip(*(rank[0] for rank in per_rank), strict=True)]


def with_columns(rows: Experience) -> Experience:
    generator = torch.Generator().manual_seed(0)
    mask, count = rows.response_mask_BR, len(rows)
    return rows.replace(
        advantages_BR=torch.randn(mask.shape, generator=generator) * mask,
        old_log_probs_BR=torch.randn(mask.shape, generator=generator) * mask,
        truncated_B=torch.arange(count) % 5 == 1,
        prompt_ids_BP=torch.arange(count, dtype=torch.int32)[:, None],  # tells the rows apart
    )


def by_row(parts: list[Any], column: str) -> dict[int, Any]:
    """A column's entries of one mini-batch by row, whatever rank it went to."""
    found: dict[int, Any] = {}
    for rows, _ in parts:
        for name, value in zip(rows.prompt_ids_BP[:, 0].tolist(), getattr(rows, column), strict=True):
            found[name] = value.nonzero().flatten().tolist() if value.ndim else pytest.approx(value.item())
    return found


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_choices_over_a_minibatch_do_not_depend_on_ranks(mode: str) -> None:
    loss = PolicyLossConfig(loss_mode=mode, clip_cov_lb=-9.0, clip_cov_ub=9.0, clip_cov_ratio=0.3, kl_cov_ratio=0.3)
    actor = ActorConfig(policy_loss=loss, mask_truncated=True, sample_weight=SampleWeightConfig(length=True))
    rows = with_columns(experience(4, 3))
    one, three = minibatches_given(actor, 1, rows), minibatches_given(actor, 3, rows)
    assert len(one) == len(three) == 4
    for alone, spread in zip(one, three, strict=True):
        assert by_row(alone, "sample_weight_B") == by_row(spread, "sample_weight_B")
        assert by_row(alone, "selected_BR") == by_row(spread, "selected_BR")
        kept = by_row(alone, "sample_weight_B")
        assert {d.num_sequences for _, d in spread} == {len(kept)} and not {1, 6, 11} & set(kept)
        chosen = sum(int(part.selected_BR.sum()) for part, _ in spread)
        assert chosen == max(int(0.3 * spread[0][1].num_tokens), 1)


def test_clip_cov_draws_anew_for_each_step_and_epoch() -> None:
    loss = PolicyLossConfig(loss_mode="clip_cov", clip_cov_lb=-9.0, clip_cov_ub=9.0, clip_cov_ratio=0.3)
    rows = with_columns(experience(4, 6))
    draws = [
        str(by_row(parts, "selected_BR"))
        for step in (1, 2)
        for parts in minibatches_given(ActorConfig(policy_loss=loss), 1, rows, step)[::2]  # the same two prompts
    ]
    assert len(set(draws)) == 4
    again = minibatches_given(ActorConfig(policy_loss=loss), 1, rows, 2)[::2]
    assert [str(by_row(parts, "selected_BR")) for parts in again] == draws[2:]


def test_rows_without_a_backward_pass_weigh_a_third() -> None:
    """Four rows of one length, the first and last without advantage: each rank gets one that has a backward pass."""
    whole, advantages_B = torch.ones(4, 3, dtype=torch.bool), torch.tensor([0.0, 1.0, 1.0, 0.0])
    rows = experience(2, 2)
    rows = Experience(
        prompt_ids_T=rows.prompt_ids_T,
        prompt_length_B=rows.prompt_length_B,
        response_ids_BR=torch.ones(4, 3, dtype=torch.int32),
        response_length_B=torch.full((4,), 3),
        response_mask_BR=whole,
        advantages_BR=advantages_B[:, None] * whole,
        group_B=rows.group_B,
    )
    group = FakeGroup(2, lambda method, rank, minibatches: [{} for _ in minibatches])
    rules = UpdateRules(
        prompts_per_mini_batch=2, epochs=1, shuffle=False, seed=1, max_response_length=3, actor=ActorConfig()
    )
    ActorHandle(group, plan(2), balance=True, timeout_s=1).update(rows, rules, 1)
    (_, per_rank) = group.given[0]
    for (minibatches,) in per_rank:
        assert sorted(minibatches[0][0].advantages_BR[:, 0].tolist()) == [0.0, 1.0]


def test_rows_of_one_prompt_stay_on_one_rank_where_they_share_it() -> None:
    """Four prompts with two responses each, on two ranks: two whole prompts each, unless a prompt costs every row."""
    rows = experience(4, 2)
    prompt_ids_BP = torch.arange(4, dtype=torch.int32).repeat_interleave(2)[:, None].expand(8, 50) + 1
    rows = rows.replace(prompt_ids_BP=prompt_ids_BP.contiguous(), prompt_length_B=torch.full((8,), 50))
    rules = UpdateRules(prompts_per_mini_batch=4, epochs=1, shuffle=False, seed=1, max_response_length=3)
    group = FakeGroup(2, lambda method, rank, minibatches: [{} for _ in minibatches])
    ActorHandle(group, plan(2), balance=True, timeout_s=1, share_prompts=True).update(rows, rules, 1)
    ((_, per_rank),) = group.given
    prompts = [set(minibatches[0][0].prompt_ids_BP[:, 0].tolist()) for (minibatches,) in per_rank]
    assert prompts[0] | prompts[1] == {1, 2, 3, 4} and not prompts[0] & prompts[1]


@pytest.mark.parametrize("key", ["balance_loss_coef", "z_loss_coef", "bias_update_rate"])
def test_routers_that_count_tokens_share_nothing(key: str) -> None:
    """The driver spreads rows as the engine computes them: whole ones, where routers count every token."""
    counting = plan(2)
    for routers, shares in (
        (counting.roles["actor"].config.router, True),
        (RouterConfig(**cast(Any, {key: 0.1})), False),
    ):
        role = replace(counting.roles["actor"].config, router=routers)
        roles = {**counting.roles, "actor": replace(counting.roles["actor"], config=role)}
        options = handle_options(TrainerConfig(), replace(counting, roles=roles), "actor", None)
        assert options["share_prompts"] is shares


def test_an_empty_minibatch_is_left_out_and_counted() -> None:
    rows = with_columns(experience(4, 2)).replace(truncated_B=torch.tensor([True] * 4 + [False] * 4))

    def train(method: str, rank: int, minibatches: list[Any]) -> list[dict[str, Metric]]:
        return [{"rows": Metric(value=len(part), reduction="sum")} for part, _ in minibatches]

    rules = UpdateRules(
        prompts_per_mini_batch=2, epochs=1, shuffle=False, seed=1, max_response_length=3,
        actor=ActorConfig(mask_truncated=True),
    )  # fmt: skip
    policy = ActorHandle(FakeGroup(2, train), plan(2), balance=True, timeout_s=1)
    assert policy.update(rows, rules, 1) == {"rows": 4.0, "empty_minibatches": 1.0}
    silent = rows.response_mask_BR & (rows.group_B < 2)[:, None]  # every token of the others was rejected
    rejected = rows.replace(response_mask_BR=silent, truncated_B=torch.zeros(8, dtype=torch.bool))
    assert policy.update(rejected, rules, 1) == {"rows": 4.0, "empty_minibatches": 1.0}
    all_cut = rows.replace(truncated_B=torch.ones(8, dtype=torch.bool))
    assert policy.update(all_cut, rules, 1) == {"empty_minibatches": 2.0}


def test_the_engines_are_compared_at_the_first_update_only() -> None:
    """Later updates see a policy that has moved: log-probs are off by 0 at the first, by 0.5 more at each later one."""
    objective = PolicyObjective(ActorConfig())

    def train(method: str, rank: int, minibatches: list[Any]) -> list[dict[str, Metric]]:
        steps = []
        for number, (part, counts) in enumerate(minibatches):
            moved = torch.full(part.response_mask_BR.shape, -1.0 + 0.5 * number)
            steps.append(objective({"log_probs": moved, "entropy": moved}, part, counts)[1])
        return steps

    rows = with_columns(experience(4, 2))
    rows = rows.replace(rollout_log_probs_BR=torch.full(rows.response_mask_BR.shape, -1.0))
    rules = UpdateRules(prompts_per_mini_batch=2, epochs=2, shuffle=False, seed=1, max_response_length=3)
    metrics = ActorHandle(FakeGroup(2, train), plan(2), balance=True, timeout_s=1).update(rows, rules, 1)
    found = finish(metrics)
    assert found["rollout_corr/log_prob_gap_max"] == found["training/rollout_probs_diff_max"] == 0
    assert found["rollout_corr/kl"] == 0 and found["rollout_corr/chi2_seq"] == pytest.approx(0)


def test_neighbours_of_a_sequence_group_get_the_same_rows() -> None:
    """Four ranks, Ulysses over 2: two shares of the rows, each to two neighbours; one answer of each share counts."""

    def values(method: str, rank: int, batch: Any) -> Evaluated:
        assert method == "critic.values"
        return Evaluated(response_length_B=batch.response_length_B, values_BR=batch.response_ids_BR.float() + rank // 2)

    sizes = plan(4, ulysses=2)
    group = FakeGroup(4, values)
    critic = CriticHandle(group, sizes, balance=True, timeout_s=1)
    batch = experience(3, 2)
    joined = critic.values(batch).values_BR  # type: ignore[arg-type]
    (_, per_rank), seen = group.given[0], []
    for first, second in ((0, 1), (2, 3)):
        assert torch.equal(per_rank[first][0].response_ids_BR, per_rank[second][0].response_ids_BR)
        seen += [first // 2] * len(per_rank[first][0])
    assert joined is not None and joined.shape == batch.response_ids_BR.shape
    assert len(seen) == len(batch) and 0 < sum(seen) < len(batch)

    def train(method: str, rank: int, minibatches: list[Any]) -> list[dict[str, Metric]]:
        report = {"rows": Metric(value=len(minibatches[0][0]), reduction="sum")} if rank % 2 == 0 else {}
        return [report for _ in minibatches]

    group = FakeGroup(4, train)
    rules = UpdateRules(prompts_per_mini_batch=3, epochs=1, shuffle=False, seed=1, max_response_length=3)
    metrics = ActorHandle(group, sizes, balance=True, timeout_s=1).update(batch, rules, 1)
    assert metrics == {"rows": 6.0}
    (_, per_rank) = group.given[0]
    assert per_rank[0] is per_rank[1] or per_rank[0][0] is per_rank[1][0]


def test_metrics_over_optimizer_steps() -> None:
    steps = [
        {
            "pg_loss": Metric(value=loss, reduction="sum"),
            "largest": Metric(value=loss, reduction="max"),
            "skipped_steps": Metric(value=1.0, reduction="sum"),
        }
        for loss in (1.0, 3.0)
    ]
    assert average_steps(steps) == {"pg_loss": 2.0, "largest": 3.0, "skipped_steps": 2.0}


def test_skipped_updates_in_a_row_are_counted_over_steps() -> None:
    """A rank reports a skipped update for all; one update that was made begins the count anew."""
    answers = iter([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    shown: list[int] = []

    def answer(method: str, rank: int, minibatches: list[Any]) -> list[dict[str, Metric]]:
        if rank == 0:
            answer.values = next(answers)  # type: ignore[attr-defined]
        skipped = answer.values if rank == 0 else [0.0, 0.0]  # type: ignore[attr-defined]
        return [{"skipped_steps": Metric(value=value, reduction="sum")} for value in skipped]

    policy = ActorHandle(FakeGroup(2, answer), plan(2), balance=True, timeout_s=1)
    rules = UpdateRules(prompts_per_mini_batch=2, epochs=1, shuffle=False, seed=1, max_response_length=4)
    for step in (1, 2, 3):
        policy.update(experience(4, 1), rules, step)
        shown.append(policy.num_skipped_in_a_row)
    assert shown == [2, 1, 3]


def test_names_of_spoilt_tensors_come_from_all_ranks() -> None:
    bad = [["b"], [], ["a", "b"]]
    group = FakeGroup(3, lambda method, rank, path: bad[rank])
    assert ActorHandle(group, plan(1), balance=True, timeout_s=1).save("folder") == ["a", "b"]


def parted(rows: Experience) -> Experience:
    """Three rows of a group are two episodes; the later part of the first has a prompt of its own."""
    number = torch.tensor([i - (i % 3 == 2) * 2 for i in range(len(rows))])
    return with_columns(rows).replace(episode_B=number, score_B=number.float())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_episodes_tokens_are_counted_before_its_rows_part(world_size: int) -> None:
    rows = parted(experience(4, 3))
    for parts in minibatches_given(ActorConfig(), world_size, rows):
        found = [row for part, _ in parts for row in part.split([1] * len(part))]
        totals: dict[int, int] = {}
        for row in found:
            number = int(row.episode_B[0])  # type: ignore[index]
            totals[number] = totals.get(number, 0) + int(row.response_mask_BR.sum())
        assert {d.num_sequences for _, d in parts} == {len(totals)} == {4}
        assert [int(row.episode_tokens_B[0]) for row in found] == [  # type: ignore[index]
            totals[int(row.episode_B[0])]  # type: ignore[index]
            for row in found
        ]


def test_rows_of_one_group_with_different_prompts_share_none() -> None:
    """Shared prompts go by their tokens, so that a group whose episodes were rewritten is no special case."""
    rows = parted(experience(1, 3)).replace(prompt_ids_BP=torch.tensor([[5], [5], [6]], dtype=torch.int32))
    assert [min(common, 1) for common in beginnings(rows).common] == [0, 1, 0]
    together = RowBalance(share_prompts=True).shares(rows, 1)
    assert together == [[0, 1, 2]]
