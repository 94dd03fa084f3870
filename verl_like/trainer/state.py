"""State that the loop itself must remember between steps. Everything else lives in the engines or in the sampler."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self

from verl_like.algorithms.kl import KLController
from verl_like.algorithms.reward_shaping import RunningMoments


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Step counter, version of the actor's weights, KL controller and moments of the rewards seen so far.

    `advance` is the only place where the first three move; the moments move where rewards are shaped.
    """

    step: int  # finished steps
    weight_version: int  # number of the last step that changed the actor; 0: as loaded
    kl: KLController
    reward_moments: RunningMoments = field(default_factory=RunningMoments)  # of algorithm.reward_norm: running

    @property
    def kl_coef(self) -> float:
        """Coefficient of the KL penalty in the reward (algorithm.kl_ctrl), as of before this step's update."""
        return self.kl.coef

    def with_reward_moments(self, moments: RunningMoments) -> Self:
        """State after this step's rewards were taken into the running moments."""
        return dataclasses.replace(self, reward_moments=moments)

    def advance(self, metrics: dict[str, float], *, num_sequences: int, actor_updated: bool) -> Self:
        """Advance by one step; the adaptive controller sees the KL that make_experience measured."""
        step = self.step + 1
        kl = self.kl.update(metrics["critic/kl"], num_sequences) if "critic/kl" in metrics else self.kl
        return dataclasses.replace(
            self, step=step, weight_version=step if actor_updated else self.weight_version, kl=kl
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "weight_version": self.weight_version,
            "kl": self.kl.state_dict(),
            "reward_moments": self.reward_moments.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> Self:
        kl = self.kl.load_state_dict(state["kl"])
        moments = RunningMoments.from_state_dict(state["reward_moments"])
        return dataclasses.replace(
            self, step=state["step"], weight_version=state["weight_version"], kl=kl, reward_moments=moments
        )
