"""Typed faces of a pool's models: a call of the loop becomes one call on every rank.

Each method splits its struct over the data-parallel ranks, calls, waits and joins. Nothing here knows Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from verl_like.algorithms.minibatch import count_episode_tokens, cut_minibatches, denominators_of
from verl_like.algorithms.mismatch import without_gap
from verl_like.algorithms.objectives import PolicyObjective
from verl_like.algorithms.preparation import prepare_batch, prepare_minibatch
from verl_like.batch import Denominators, Evaluated, Experience, Metric, Rollouts, Sequences, merge_metrics
from verl_like.cluster.worker_group import PendingResult, WorkerGroup
from verl_like.config import ActorConfig, DistillationConfig, TrainerConfig
from verl_like.config.actor import ReplayMode
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.roles import ACTOR, CRITIC, REF, REWARD
from verl_like.models.cost import ModelCost
from verl_like.models.loading import shares_prompts
from verl_like.trainer.dispatch import RowBalance, join_rows, split_rows

Minibatches = list[tuple[Experience, Denominators]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRules:
    """Rules by which one role's update walks over the experience."""

    prompts_per_mini_batch: int
    epochs: int
    shuffle: bool
    seed: int
    max_response_length: int
    actor: ActorConfig | None = None  # its options that act on whole mini-batches; None: the critic's update
    distillation: DistillationConfig | None = None  # the actor's teachers


def handle_options(trainer: TrainerConfig, plan: BatchPlan, name: str, cost: ModelCost | None) -> dict[str, Any]:
    """Options of the handle of a role of the plan, besides its pool: see RoleHandle."""
    role = plan.roles[name].config
    sharing = {"cost": cost, "share_prompts": shares_prompts(role.model, role.router)}
    return {"balance": trainer.balance_batch, "timeout_s": trainer.rpc_timeout, **sharing}


class RoleHandle:
    """Role of a worker group, with the driver's habits: balance rows, wait with a limit, join in order."""

    role: str  # its name in the plan, and in the calls "role.method"

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
        """Take the role of a worker group.

        Args:
            group: the processes of the role's pool.
            plan: batch plan of the run.
            balance: balance rows over the ranks.
            timeout_s: seconds that a call may take.
            cost: of the role's model, by which rows are balanced; None: by tokens.
            share_prompts: rows with the same prompt cost less on the same rank.
        """
        self.group, self.plan, self.timeout_s = group, plan, timeout_s
        self.num_skipped_in_a_row = 0  # optimizer steps, up to the newest, whose gradient was not finite
        self.balance = RowBalance(even=balance, cost=cost, share_prompts=share_prompts)

    @property
    def ranks_per_row(self) -> int:
        """Number of neighbouring ranks that get the same rows.

        Ulysses, context, tensor and pipeline parallelism need several.
        """
        return self.plan.roles[self.role].ranks_per_row

    @property
    def num_shares(self) -> int:
        """Number of groups of ranks with rows of their own."""
        return self.plan.roles[self.role].data_parallel_size

    def evaluate(self, method: str, batch: Sequences) -> Evaluated:
        """Call a forward method on balanced shares of the rows."""
        light, copies = as_sequences(batch), self.ranks_per_row
        if self.plan.roles[self.role].config.replay == ReplayMode.R3:
            light = light.with_routes(batch)
        shares = self.balance.shares(light, self.num_shares)
        parts = self.call(method, _repeated(split_rows(light, shares), copies))
        return join_rows(parts[::copies], shares)

    def update(self, experience: Experience, rules: UpdateRules, step: int) -> dict[str, float]:
        """Take all optimizer steps of the role in one call; metrics are joined over ranks, then over steps."""
        copies = self.ranks_per_row
        shares: list[Minibatches] = [[] for _ in range(self.num_shares)]
        num_empty = 0
        for rows in self._minibatches(experience.replace(rewards_T=None), rules, step):
            if rows.response_mask_T.any():
                self._append_minibatch(shares, rows, rules)
            else:
                num_empty += 1
        steps_by_rank = self.call("update", _repeated(shares, copies))
        steps = [merge_metrics(parts) for parts in zip(*steps_by_rank, strict=True)]
        for metrics in steps:
            skipped = "skipped_steps" in metrics and metrics["skipped_steps"].value > 0
            self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if skipped else 0
        metrics = average_steps([*steps[:1], *(without_gap(metrics) for metrics in steps[1:])])
        return metrics | {"empty_minibatches": float(num_empty)} if num_empty else metrics

    def _minibatches(self, experience: Experience, rules: UpdateRules, step: int) -> Iterator[Experience]:
        """Yield the rows of each optimizer step, with what the actor's options compute over the rows of one step."""
        if rules.actor is not None:
            experience = prepare_batch(experience, rules.actor)
        else:
            experience = experience.with_routes(None)  # the critic's routers are another model's
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
        """Append a mini-batch to the shares: cut first, balance second, so that rows change ranks only inside it."""
        denominators = denominators_of(rows, rules.max_response_length)
        rows = count_episode_tokens(rows)
        forward_only_B = None
        if rules.actor is not None:
            forward_only_B = PolicyObjective(rules.actor, distillation=rules.distillation).without_gradient(rows)
        shares = self.balance.shares(rows, self.num_shares, forward_only_B)
        for minibatches, part in zip(per_share, split_rows(rows, shares), strict=True):
            minibatches.append((part, denominators))

    def checksums(self) -> dict[str, int]:
        """Checksums of the role's weights, by tensor."""
        return self.call_all("checksums")[0]

    def save(self, path: str) -> list[str]:
        """Write the role's checkpoint; return the names of tensors that are not finite: then nothing is written."""
        return sorted({name for names in self.call_all("save", path) for name in names})

    def saved(self, *, wait: bool) -> bool:
        """True where no rank writes a checkpoint in the background; `wait`: wait until that is so."""
        return all(self.call_all("saved", wait))

    def load(self, path: str) -> None:
        """Restore the role from a checkpoint."""
        self.call_all("load", path)

    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call one method of the role on every rank; return its results."""
        return self.wait(self.group.call(f"{self.role}.{method}", per_rank))

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call one method of the role with the same arguments on all ranks; return its results."""
        return self.wait(self.group.call_all(f"{self.role}.{method}", *arguments))

    def wait(self, pending: PendingResult) -> list[Any]:
        return pending.wait(timeout=self.timeout_s)


class ActorHandle(RoleHandle):
    """Policy that is trained. on_change: called when its weights are no longer those that were synced."""

    role = ACTOR

    def __init__(self, *arguments: Any, on_change: Callable[[], None] = lambda: None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._on_change = on_change

    def log_probs(self, rollouts: Rollouts) -> Evaluated:
        return self.evaluate("log_probs", rollouts)

    def usual_log_probs(self, rollouts: Rollouts) -> Evaluated:
        """`log_probs` by torch's usual kernels, of a trainer whose own are exact."""
        return self.evaluate("usual_log_probs", rollouts)

    def update(self, experience: Experience, rules: UpdateRules, step: int) -> dict[str, float]:
        self._on_change()
        return super().update(experience, rules, step)

    def load(self, path: str) -> None:
        self._on_change()
        super().load(path)


class ReferenceHandle(RoleHandle):
    """Policy that is frozen."""

    role = REF

    def log_probs(self, rollouts: Rollouts) -> Evaluated:
        return self.evaluate("log_probs", rollouts)


class TeacherHandle(RoleHandle):
    """Teacher that is a frozen model of the run. role: its name."""

    def __init__(self, role: str, *arguments: Any, **options: Any) -> None:
        self.role = role
        super().__init__(*arguments, **options)

    def log_probs(self, rollouts: Rollouts) -> Evaluated:
        return self.evaluate("log_probs", rollouts)


class Teachers(Protocol):
    """All teachers of a run (plugins/teachers)."""

    def evaluate(self, rollouts: Rollouts) -> Evaluated: ...


class CriticHandle(RoleHandle):
    """Value model."""

    role = CRITIC

    def values(self, rollouts: Rollouts) -> Evaluated:
        return self.evaluate("values", rollouts)


def _repeated(shares: Sequence[Any], copies: int) -> list[tuple[Any]]:
    """Repeat arguments for every rank: `copies` neighbours get the same share."""
    return [(share,) for share in shares for _ in range(copies)]


class RewardModelHandle(RoleHandle):
    """Reward model."""

    role = REWARD

    def scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """One number for each text, given as tokens; see workers.roles.RewardWorker for how a text becomes a row."""
        count = len(texts)
        one = torch.ones(count, dtype=torch.int64)
        rows = Sequences(
            prompt_ids_T=torch.tensor([token for text in texts for token in text], dtype=torch.int32),
            prompt_length_B=torch.tensor([len(text) for text in texts]),
            response_ids_T=torch.zeros(count, dtype=torch.int32),
            response_length_B=one,
            response_mask_T=one.bool(),
        )
        values_T = self.evaluate("scores", rows).values_T
        assert values_T is not None
        return values_T.tolist()


def as_sequences(batch: Sequences) -> Sequences:
    """Select what a forward pass needs: dataset rows and log-probs stay on the driver."""
    return Sequences(
        prompt_ids_T=batch.prompt_ids_T,
        prompt_length_B=batch.prompt_length_B,
        response_ids_T=batch.response_ids_T,
        response_length_B=batch.response_length_B,
        response_mask_T=batch.response_mask_T,
        media=batch.media,
    )


def average_steps(steps: Sequence[dict[str, Metric]]) -> dict[str, float]:
    """Average metrics of several optimizer steps to one number each: extremes stay extremes, counts add."""
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
