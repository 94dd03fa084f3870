"""Residency: the one place that decides what is in device memory, where models and the rollout engine share it.

*train*: weights, gradients and optimizer states of the models are resident, the rollout engine sleeps.
*rollout*: rollout weights and KV cache are resident; of the models only what their fsdp_config keeps on the device.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from verl_like.engine.fsdp import FSDPEngine
from verl_like.rollout.rollout_engine import RolloutEngine


class Phase(enum.Enum):
    train = "train"
    rollout = "rollout"


class Residency:
    """Of one process that hosts models and a rollout engine. With one of the two alone (None, or no model) everything
    stays where it is."""

    def __init__(self, models: Sequence[FSDPEngine], rollout: RolloutEngine | None) -> None:
        self.phase = Phase.train
        self._models, self._rollout = models, rollout if models else None
        if self._rollout is not None:
            self._rollout.sleep()

    def enter(self, phase: Phase) -> None:
        """Make room for the calls of `phase`; nothing happens when it is the current one."""
        if phase is self.phase:
            return
        self.phase = phase
        if self._rollout is None:
            return
        if phase is Phase.train:
            self._rollout.sleep()
            return
        for engine in self._models:
            engine.offload(params=engine.role.fsdp.param_offload, optimizer=engine.role.fsdp.optimizer_offload)
        self._rollout.wake()
