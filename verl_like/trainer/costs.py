"""Costs of a run: its models' work, and what two parts of the kit tell of memory and speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from verl_like.batch import Experience, Rollouts
from verl_like.config import ModelConfig, PPOConfig
from verl_like.config.batch_plan import BatchPlan
from verl_like.config.distillation import is_teacher
from verl_like.config.roles import CRITIC, trains_rewards
from verl_like.models.cost import ModelCost
from verl_like.models.loading import load_hf_config

NO_ROOM = "DOES NOT FIT"  # in the forecast's text of a phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Costs of the run's trained models, by which rows are balanced over ranks too."""

    actor: ModelCost
    critic: ModelCost | None
    teachers: Mapping[str, ModelCost] = field(default_factory=dict)  # by the name of their role

    @classmethod
    def of(cls, config: PPOConfig, plan: BatchPlan) -> ModelCosts:
        """Count the costs from the models' configs; no memory is used for weights."""
        actor, critic = _cost_of(config.actor_rollout_ref.model), config.critic.model
        return cls(
            actor=actor.with_value_head() if trains_rewards(config) else actor,
            critic=_cost_of(critic).with_value_head() if CRITIC in plan.roles else None,
            teachers={n: _cost_of(role.config.model) for n, role in plan.roles.items() if is_teacher(n)},
        )


class Forecast(Protocol):
    """Memory of one device by phase, foretold."""

    def metrics(self) -> dict[str, float]:
        """Return perf/memory_forecast/<phase> in GiB."""
        ...

    def text(self) -> str:
        """Describe the room of a device, and what each phase takes of it; NO_ROOM where it is too little."""
        ...


class SpeedReport(Protocol):
    """Distance of each step from what the devices allow."""

    def metrics(
        self, rollouts: Rollouts | Experience, seconds: Mapping[str, float], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """perf/mfu/*, perf/floor_ratio/* and perf/memory_forecast/* of one step, whose other metrics are known."""
        ...

    def log(self, seconds: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """The step's phases against their floors, and advice, in the log."""
        ...


def _cost_of(model: ModelConfig) -> ModelCost:
    return ModelCost.of(load_hf_config(model), trust_remote_code=model.trust_remote_code)
