"""What the loop itself must remember between steps. Everything else lives in the engines or in the sampler."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from verl_like.algorithms.kl import KLController


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """Step counter and KL controller. `advance` is the only place where either moves."""

    step: int  # finished steps
    kl: KLController

    @property
    def kl_coef(self) -> float:
        """Coefficient of the KL penalty in the reward (algorithm.kl_ctrl), as of before this step's update."""
        return self.kl.coef

    @property
    def weight_version(self) -> int:
        """Version of the trained weights: the number of the step that made them."""
        return self.step

    def advance(self, metrics: dict[str, float], *, num_sequences: int) -> Self:
        """One step further; the adaptive controller sees the KL that make_experience measured."""
        kl = self.kl.update(metrics["critic/kl"], num_sequences) if "critic/kl" in metrics else self.kl
        return dataclasses.replace(self, step=self.step + 1, kl=kl)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "kl": self.kl.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> Self:
        return dataclasses.replace(self, step=state["step"], kl=self.kl.load_state_dict(state["kl"]))
