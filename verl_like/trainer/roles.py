"""Typed faces of the worker group: what the loop says, turned into one call on every rank.

Each method splits its struct over the data-parallel ranks, calls, waits and joins. Nothing here knows Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from verl_like.algorithms.minibatch import count_episode_tokens, cut_minibatches, denominators_of
from verl_like.algorithms.mismatch import without_gap
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.algorithms.preparation import prepare_batch, prepare_minibatch
from verl_like.batch import (
    Denominators,
    Evaluated,
    Experience,
    Metric,
    Rollouts,
    Sequences,
    merge_metrics,
)
from verl_like.cluster.worker_group import PendingResult, WorkerGroup
from verl_like.config import ActorConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.models.cost import ModelCost
from verl_like.rollout.client import RolloutClient
from verl_like.trainer.dispatch import RowBalance, join_rows, split_rows
from verl_like.trainer.replicas import Replicas, SamplingClient
from verl_like.weight_sync.sync import SyncReport

T = TypeVar("T")
Minibatches = list[tuple[Experience, Denominators]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRules:
    """How one role's update walks over the experience."""

    prompts_per_mini_batch: int
    epochs: int
    shuffle: bool
    seed: int
    max_response_length: int
    actor: ActorConfig | None = None  # its options that act on whole mini-batches; None: the critic's update


class RoleGroup:
    """A worker group with the driver's habits: balance rows, wait with a limit, join in order."""

    def __init__(
        self,
        group: WorkerGroup,
        plan: BatchPlan,
        *,
        balance: bool,
        timeout_s: float,
        cost: ModelCost | None = None,
        share_prompts: bool = False,
    ) -> None:
        """cost: of the role's model, by which rows are balanced; None: by tokens.

        share_prompts: rows with the same prompt cost less on the same rank.
        """
        self.group, self.plan, self.timeout_s = group, plan, timeout_s
        self.num_skipped_in_a_row = 0  # optimizer steps, up to the newest, whose gradient was not finite
        self.balance = RowBalance(even=balance, cost=cost, share_prompts=share_prompts)

    def ranks_per_row(self) -> int:
        """Neighbouring ranks that get the same rows, and a slice of their tokens each (Ulysses, tensor parallelism)."""
        raise NotImplementedError

    def evaluate(self, method: str, batch: Sequences, *, ranks_per_row: int | None = None) -> Evaluated:
        """Call a forward method on balanced shares of the rows."""
        light, copies = as_sequences(batch), ranks_per_row or self.ranks_per_row()
        shares = self.balance.shares(light, self.group.world_size // copies)
        parts = self.wait(self.group.call(method, _repeated(split_rows(light, shares), copies)))
        return join_rows(parts[::copies], shares)

    def update(self, method: str, experience: Experience, rules: UpdateRules, step: int) -> dict[str, float]:
        """All optimizer steps of one role in one call; metrics joined over ranks, then over optimizer steps."""
        copies = self.ranks_per_row()
        shares: list[Minibatches] = [[] for _ in range(self.group.world_size // copies)]
        num_empty = 0
        for rows in self._minibatches(experience, rules, step):
            if rows.response_mask_T.any():
                self._append_minibatch(shares, rows, rules)
            else:
                num_empty += 1
        steps_by_rank = self.wait(self.group.call(method, _repeated(shares, copies)))
        steps = [merge_metrics(parts) for parts in zip(*steps_by_rank, strict=True)]
        for metrics in steps:
            skipped = "skipped_steps" in metrics and metrics["skipped_steps"].value > 0
            self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if skipped else 0
        metrics = average_steps([*steps[:1], *(without_gap(metrics) for metrics in steps[1:])])
        return metrics | {"empty_minibatches": float(num_empty)} if num_empty else metrics

    def _minibatches(self, experience: Experience, rules: UpdateRules, step: int) -> Iterator[Experience]:
        """Rows of each optimizer step, with what the actor's options compute over the rows of one step."""
        if rules.actor is not None:
            experience = prepare_batch(experience, rules.actor)
        for epoch in range(rules.epochs):
            indices = cut_minibatches(
                experience.group_B,
                prompts_per_mini_batch=rules.prompts_per_mini_batch,
                shuffle=rules.shuffle,
                seed=rules.seed + step,
                epoch=epoch,
            )
            for number, index in enumerate(indices):
                rows, seed = experience.select(index), (rules.seed, step, epoch, number)
                yield rows if rules.actor is None else prepare_minibatch(rows, rules.actor, seed)

    def _append_minibatch(self, per_share: list[Minibatches], rows: Experience, rules: UpdateRules) -> None:
        """Cut first, balance second: rows change ranks only inside their own mini-batch."""
        denominators = denominators_of(rows, rules.max_response_length)
        rows = count_episode_tokens(rows)
        forward_only_B = None if rules.actor is None else PolicyObjective(rules.actor).without_gradient(rows)
        shares = self.balance.shares(rows, self.group.world_size // self.ranks_per_row(), forward_only_B)
        for minibatches, part in zip(per_share, split_rows(rows, shares), strict=True):
            minibatches.append((part, denominators))

    def save_role(self, method: str, path: str) -> list[str]:
        """Write a role's checkpoint; or the names of its tensors that are not finite, and nothing is written."""
        return sorted({name for names in self.wait(self.group.call_all(method, path)) for name in names})

    def wait(self, pending: PendingResult) -> list[Any]:
        return pending.wait(timeout=self.timeout_s)


class PolicyGroup(RoleGroup):
    """Actor, reference and rollout of the pool."""

    def __init__(self, *arguments: Any, max_running_requests: int | None = None, **options: Any) -> None:
        """max_running_requests: in each replica; None: all. The rest is RoleGroup's."""
        super().__init__(*arguments, **options)
        self._max_running_requests = max_running_requests
        self._replicas: Replicas | None = None  # from the first call of `sample` on

    def ranks_per_row(self) -> int:
        return self.plan.actor_ranks_per_row

    def sample(self, work: Callable[[RolloutClient], Future[T]]) -> T:
        """Let the replicas sample until the future that `work` returns is done; its result.

        work(client): submits what is to begin together, and returns; more may be submitted later, from any thread. If
        it fails, all that is pending is aborted, its client refuses from then on, and its error is raised. What is
        pending otherwise stays where it is, and goes on in the next call.
        Raises WorkerError when a rank fails; then the pending futures fail, and there is no next call.
        """
        if self._replicas is None:
            ways = self.wait(self.group.call_all("open_link"))
            self._replicas = Replicas.open(ways, self.plan.tensor_parallel_size, self._max_running_requests)
        replicas = self._replicas
        client = SamplingClient(replicas.router)
        try:
            future = work(client)
        except BaseException:
            client.close()
            raise
        told: Future[list[Future[None]]] = Future()

        def end(ended: Future[T]) -> None:
            replicas.router.hold()
            if ended.cancelled() or ended.exception() is not None:
                client.close()
            told.set_result([link.pause() for link in replicas.links])

        try:
            served = replicas.release()
            future.add_done_callback(end)
            self.wait(self.group.call("serve", served))
            for paused in told.result(self.timeout_s):
                paused.result(self.timeout_s)  # what ended there is known here: the next call begins with nothing of it
        except BaseException:
            self.close()
            raise
        return future.result()

    def close(self) -> None:
        """Cut the links; what is pending fails."""
        replicas, self._replicas = self._replicas, None
        if replicas is not None:
            replicas.router.close()

    def old_log_probs(self, rollouts: Rollouts) -> Evaluated:
        return self.evaluate("old_log_probs", rollouts)

    def ref_log_probs(self, rollouts: Rollouts) -> Evaluated:
        return self.evaluate("ref_log_probs", rollouts, ranks_per_row=self.plan.ref_ranks_per_row)

    def sync_weights(self, version: int) -> SyncReport | None:
        """Fill the rollout engines with the trained weights; the slowest rank's report."""
        reports = [r for r in self.wait(self.group.call_all("sync_weights", version)) if r is not None]
        return max(reports, key=lambda report: report.seconds, default=None)

    @contextmanager
    def profiled(self, step: int) -> Iterator[None]:
        """Record everything that the workers do inside; each chosen rank writes its trace at the end."""
        self.wait(self.group.call_all("start_profile", step))
        yield
        self.wait(self.group.call_all("stop_profile"))

    def save(self, path: str) -> list[str]:
        return self.save_role("save_actor", path)

    def load(self, path: str) -> None:
        self.wait(self.group.call_all("load_actor", path))

    def saved(self, *, wait: bool) -> bool:
        """Whether no rank writes a checkpoint in the background; `wait`: until it is so."""
        return all(self.wait(self.group.call_all("saved_all", wait)))


class CriticGroup(RoleGroup):
    """The value model of the pool."""

    def ranks_per_row(self) -> int:
        return self.plan.critic_ranks_per_row

    def values(self, rollouts: Rollouts) -> Evaluated:
        return self.evaluate("values", rollouts)

    def save(self, path: str) -> list[str]:
        return self.save_role("save_critic", path)

    def load(self, path: str) -> None:
        self.wait(self.group.call_all("load_critic", path))


def _repeated(shares: Sequence[Any], copies: int) -> list[tuple[Any]]:
    """Arguments of every rank: `copies` neighbours get the same share."""
    return [(share,) for share in shares for _ in range(copies)]


class RewardModelGroup(RoleGroup):
    """The reward model, in the policy's processes or in a pool of its own."""

    def ranks_per_row(self) -> int:
        return self.plan.reward_ranks_per_row

    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """One number for each text, given as tokens; see workers.reward for how a text becomes a row."""
        count = len(texts)
        one = torch.ones(count, dtype=torch.int64)
        rows = Sequences(
            prompt_ids_T=torch.tensor([token for text in texts for token in text], dtype=torch.int32),
            prompt_length_B=torch.tensor([len(text) for text in texts]),
            response_ids_T=torch.zeros(count, dtype=torch.int32),
            response_length_B=one,
            response_mask_T=one.bool(),
        )
        values_T = self.evaluate("reward_scores", rows).values_T
        assert values_T is not None
        return values_T.tolist()


def as_sequences(batch: Sequences) -> Sequences:
    """Only what a forward pass needs: dataset rows and log-probs stay on the driver."""
    return Sequences(
        prompt_ids_T=batch.prompt_ids_T,
        prompt_length_B=batch.prompt_length_B,
        response_ids_T=batch.response_ids_T,
        response_length_B=batch.response_length_B,
        response_mask_T=batch.response_mask_T,
    )


def average_steps(steps: Sequence[dict[str, Metric]]) -> dict[str, float]:
    """Metrics of several optimizer steps as one number each: extremes stay extremes, counts add, the rest averages."""
    joined: dict[str, float] = {}
    for name in {name for step in steps for name in step}:
        metrics = [step[name] for step in steps if name in step]
        values = [metric.value for metric in metrics]
        if metrics[0].reduction in ("max", "min"):
            joined[name] = max(values) if metrics[0].reduction == "max" else min(values)
        elif name in COUNTS:
            joined[name] = float(sum(values))
        else:
            joined[name] = sum(values) / len(values)
    return joined


# Metrics that count events: over several optimizer steps they add up.
COUNTS = frozenset({"skipped_steps", "training/rollout_log_probs_nonfinite"})
