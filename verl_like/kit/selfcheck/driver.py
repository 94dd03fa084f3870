"""Driver's part of an update: takes the rows through the loop's own functions, up to the call of the workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from verl_like.algorithms.corrections import correct_on_driver
from verl_like.algorithms.experience import put_together
from verl_like.batch import Denominators, Evaluated, Experience
from verl_like.config import PPOConfig
from verl_like.config.batch_plan import takes_own_log_probs, uses_sampler_log_probs
from verl_like.kit.selfcheck.material import Material, OldLogProbs
from verl_like.trainer.roles import RoleHandle, UpdateRules

Share = tuple[Experience, Denominators]


def old_log_probs_of(config: PPOConfig) -> OldLogProbs:
    """Return the source of the run's old log-probs."""
    if uses_sampler_log_probs(config.actor_rollout_ref.actor, config.algorithm.rollout_correction):
        return "sampler"
    return "own" if takes_own_log_probs(config) else "given"


def experience_of(config: PPOConfig, material: Material, old: OldLogProbs) -> Experience:
    """The columns of the update as `make_experience` puts them together, with the advantages given."""
    actor, rollouts = config.actor_rollout_ref.actor, material.rollouts
    old_BR = {"given": material.old_log_probs_BR, "sampler": rollouts.rollout_log_probs_BR, "own": None}[old]
    evaluated = Evaluated(
        response_length_B=rollouts.response_length_B,
        old_log_probs_BR=old_BR,
        ref_log_probs_BR=material.ref_log_probs_BR,
        values_BR=material.values_BR,
    )
    corrected = correct_on_driver(config.algorithm.rollout_correction, actor, rollouts, evaluated)
    credit = (rollouts.flat(material.advantages_BR), rollouts.flat(material.returns_BR))
    return put_together(actor, rollouts, material.scores, evaluated, corrected, *credit)


def shares_of(
    config: PPOConfig, material: Material, old: OldLogProbs, *, ranks: int, critic: bool = False
) -> list[Share]:
    """One mini-batch of all rows as every rank gets it: options of whole mini-batches, denominators, balance."""
    experience = experience_of(config, material, old)
    rules = UpdateRules(
        prompts_per_mini_batch=len(experience),
        epochs=1,
        shuffle=False,
        seed=config.trainer.seed,
        max_response_length=config.data.max_response_length,
        actor=None if critic else config.actor_rollout_ref.actor,
    )
    calls = _KeptCall(ranks)
    _Role(calls).update(experience, rules, step=1)
    return [minibatches[0] for minibatches in calls.arguments]


class _KeptCall:
    """Stands in for a worker group: keeps the arguments of a call."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.arguments: list[list[Share]] = []

    def call(self, method: str, per_rank: Sequence[tuple[list[Share]]]) -> _KeptCall:
        self.arguments = [arguments for (arguments,) in per_rank]
        return self

    def wait(self, timeout: float) -> list[list[Any]]:
        """Return no metrics: there is no optimizer step."""
        return [[] for _ in self.arguments]


class _Role(RoleHandle):
    """A role whose ranks each have rows of their own."""

    role = "any"

    def __init__(self, calls: _KeptCall) -> None:
        super().__init__(cast(Any, calls), cast(Any, None), balance=True, timeout_s=0.0, share_prompts=True)

    @property
    def ranks_per_row(self) -> int:
        return 1

    @property
    def num_shares(self) -> int:
        return self.group.world_size
