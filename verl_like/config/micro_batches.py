"""Micro-batches of each pass over the rows: cut by a token budget or by a number of sequences, and the key that
decides.

A size that the user gives wins over the default of cutting by tokens; `*use_dynamic_bsz`, where it is given, wins over
sizes. Units as in batch_plan.py. What a run has learned to be too large stands beside the keys, which stay as they are
(`Lowered`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_like.config.fsdp import FSDPConfig
from verl_like.config.mesh import MeshSizes, tokens_together
from verl_like.config.ppo import PPOConfig


@dataclass(frozen=True, slots=True)
class MicroBatchRule:
    """Rule by which a process cuts its rows into micro-batches: a token budget, or a number of sequences."""

    max_tokens: int | None = None
    max_sequences: int | None = None
    apart: bool = False  # max_tokens counts every row whole, whatever rows begin with in common

    def __post_init__(self) -> None:
        if (self.max_tokens is None) == (self.max_sequences is None):
            raise ValueError(f"set exactly one of max_tokens={self.max_tokens}, max_sequences={self.max_sequences}")

    def __str__(self) -> str:
        if self.max_tokens is not None:
            return f"{self.max_tokens:,} tokens{' of whole rows' * self.apart}"
        return f"{self.max_sequences:,} sequences"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """Sizes that the micro-batches of one role have since memory ran out: for the rest of the run, new starts too."""

    role: str
    most: Mapping[str, int] = field(default_factory=dict)  # by kind of pass: tokens; "... by sequences"
    apart: frozenset[str] = frozenset()  # kinds of pass whose budget counts every row whole
    count: int = 0  # times that memory ran out


class PassTooLarge(MemoryError):
    """Error of a pass that ran out of memory and cannot be repeated; a new start goes on with `lowered` instead."""

    def __init__(self, text: str, lowered: Lowered) -> None:
        super().__init__(text, lowered)  # both, so that it can be pickled
        self.lowered = lowered

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One pass: its settings with the keys they come from, and the pass whose size it takes when it has none."""

    dynamic_key: str
    dynamic: bool | None
    budget_key: str
    budget: int  # [tokens of one process]
    slices: int  # [processes] that share a row's tokens
    per_gpu_key: str
    per_gpu: int | None
    total_key: str
    total: int | None  # [sequences over all processes]; deprecated
    fallback: Cut | None = None

    @property
    def by_tokens(self) -> bool:
        if self.dynamic is not None:
            return self.dynamic
        return self._size_key is None and (self.fallback is None or self.fallback.by_tokens)

    @property
    def deciding_key(self) -> str | None:
        """The key whose number cuts this pass; None where a size is missing."""
        if self.by_tokens:
            return self.budget_key
        return None if self._sized is None else self._sized._size_key

    def rule(self, problems: list[str], data_parallel: int) -> MicroBatchRule:
        """Rule that the engine is told; sizes that do not fit are appended to `problems`."""
        if self.by_tokens:
            return MicroBatchRule(max_tokens=tokens_together(self.budget, self.slices))
        sized = self._sized
        if sized is None:
            if self.fallback is None or self.fallback.by_tokens:  # else the fallback says it
                fix = f"set {self.per_gpu_key}, or {self.dynamic_key}=true"
                problems.append(f"{self.dynamic_key}=False without a micro-batch size: {fix}")
            return MicroBatchRule(max_sequences=1)
        if sized.per_gpu is not None:
            return MicroBatchRule(max_sequences=sized.per_gpu)
        assert sized.total is not None
        if sized.total % data_parallel and (sized is self or sized.by_tokens):  # else the fallback says it
            fix = f"must be a multiple of the data-parallel size {data_parallel}; better set {sized.per_gpu_key}"
            problems.append(f"{sized.total_key}={sized.total}: {fix}")
        return MicroBatchRule(max_sequences=max(1, sized.total // data_parallel))

    @property
    def _size_key(self) -> str | None:
        if self.per_gpu is not None:
            return self.per_gpu_key
        return None if self.total is None else self.total_key

    @property
    def _sized(self) -> Cut | None:
        """The pass whose number of sequences counts: this one, or its fallback."""
        if self._size_key is not None or self.fallback is None:
            return self if self._size_key is not None else None
        return self.fallback._sized

    @property
    def idle_keys(self) -> dict[str, str]:
        """Keys of this pass that do not cut it, and why."""
        idle = {self.budget_key, self.per_gpu_key, self.total_key} - {self.deciding_key}
        if self.by_tokens:
            why = f"{self.dynamic_key}=true cuts by tokens ({self.budget_key.rpartition('.')[2]})"
        elif self.dynamic is None:
            why = f"{self.deciding_key} cuts by sequences; for a token budget set {self.dynamic_key}=true"
        else:
            why = f"{self.dynamic_key}=false cuts by sequences"
        return dict.fromkeys(sorted(idle), why)


def cuts(config: PPOConfig) -> dict[str, dict[str, Cut]]:
    """Role -> its passes ("update", "forward"); those of roles that the run lacks as well."""
    actor, ref, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.actor_rollout_ref.rollout
    update = _cut(
        "actor_rollout_ref.actor.ppo_",
        (actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu),
        (actor.ppo_micro_batch_size_per_gpu, actor.ppo_micro_batch_size),
        _slices(actor.ulysses_sequence_parallel_size, actor.fsdp_config),
    )
    log_prob = _cut(
        "actor_rollout_ref.rollout.log_prob_",
        (rollout.log_prob_use_dynamic_bsz, rollout.log_prob_max_token_len_per_gpu),
        (rollout.log_prob_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size),
        _slices(actor.ulysses_sequence_parallel_size, actor.fsdp_config),
        update,
    )
    reference = _cut(
        "actor_rollout_ref.ref.log_prob_",
        (ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu),
        (ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_micro_batch_size),
        _slices(ref.ulysses_sequence_parallel_size, ref.fsdp_config),
        update,
    )
    policy = {"actor": {"update": update, "forward": log_prob}, "ref": {"forward": reference}}
    return policy | _value_cuts(config, update)


def _value_cuts(config: PPOConfig, update: Cut) -> dict[str, dict[str, Cut]]:
    """Critic and reward model, which takes the critic's size, or else the actor's."""
    critic, reward = config.critic, config.reward_model
    values = _cut(
        "critic.ppo_",
        (critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu),
        (critic.ppo_micro_batch_size_per_gpu, critic.ppo_micro_batch_size),
        _slices(critic.ulysses_sequence_parallel_size, critic.model.fsdp_config),
    )
    forward = _cut(
        "critic.forward_",
        (critic.use_dynamic_bsz, critic.forward_max_token_len_per_gpu),
        (critic.forward_micro_batch_size_per_gpu, critic.forward_micro_batch_size),
        _slices(critic.ulysses_sequence_parallel_size, critic.model.fsdp_config),
        values,
    )
    scores = _cut(
        "reward_model.",
        (reward.use_dynamic_bsz, reward.forward_max_token_len_per_gpu),
        (reward.micro_batch_size_per_gpu, reward.micro_batch_size),
        _slices(reward.ulysses_sequence_parallel_size, reward.model.fsdp_config),
        forward if forward.dynamic or forward._sized is not None else update,
    )
    return {"critic": {"update": values, "forward": forward}, "reward": {"forward": scores}}


def _slices(ulysses: int, fsdp: FSDPConfig) -> int:
    return MeshSizes(world=1, context=fsdp.context_parallel_size, ulysses=ulysses).slices


def _cut(
    prefix: str,
    by_tokens: tuple[bool | None, int],
    by_count: tuple[int | None, int | None],
    slices: int,
    fallback: Cut | None = None,
) -> Cut:
    """by_tokens: switch and budget. by_count: sizes per process and over all. Their keys begin with `prefix`."""
    section, _, name = prefix.rpartition(".")
    return Cut(
        dynamic_key=f"{prefix if name == 'log_prob_' else section + '.'}use_dynamic_bsz",
        dynamic=by_tokens[0],
        budget_key=f"{prefix}max_token_len_per_gpu" if name else f"{section}.forward_max_token_len_per_gpu",
        budget=by_tokens[1],
        slices=slices,
        per_gpu_key=f"{prefix}micro_batch_size_per_gpu",
        per_gpu=by_count[0],
        total_key=f"{prefix}micro_batch_size",
        total=by_count[1],
        fallback=fallback,
    )
