"""Residency: the one place that decides what is in device memory, where models and the rollout engine share it.

*train*: weights, gradients and optimizer states of the models are resident, the rollout engine sleeps.
*rollout*: rollout weights and KV cache are resident; of the models only what their fsdp_config keeps on the device.

With rollout.sleep_level=2 a sleeping engine's weights are nowhere. The next sync brings them as it does anyway; where
something is generated before it (after the scores of a reward model, say), they are synced once more.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from verl_like.engine.fsdp import FSDPEngine
from verl_like.rollout.base import RolloutEngine


class Phase(enum.Enum):
    train = "train"
    rollout = "rollout"


class Residency:
    """Residency of one process that hosts models and a rollout engine.

    With one of the two alone (None, or no model) everything stays where it is. discard: the engine's weights are thrown
    away when it goes to sleep; then `restore` must be set, which syncs those that it had (collective).
    """

    def __init__(self, models: Sequence[FSDPEngine], rollout: RolloutEngine | None, *, discard: bool = False) -> None:
        self.phase = Phase.train
        self.restore: Callable[[], object] = _no_restore
        self._models, self._rollout = models, rollout if models else None
        self._discard, self._had_weights = discard, False
        if self._rollout is not None:
            self._rollout.sleep(discard=discard)

    def enter(self, phase: Phase) -> None:
        """Make room for the calls of `phase`; does nothing when it is the current one."""
        if phase is self.phase:
            return
        self.phase = phase
        if self._rollout is None:
            return
        if phase is Phase.train:
            self._had_weights = self._rollout.held is not None
            self._rollout.sleep(discard=self._discard)
            return
        if self._discard and self._had_weights and self._rollout.held is None:
            self.restore()
        for engine in self._models:
            engine.offload(params=engine.role.fsdp.param_offload, optimizer=engine.role.fsdp.optimizer_offload)
        self._rollout.wake()


def _no_restore() -> None:
    raise RuntimeError("rollout.sleep_level=2 threw the rollout engine's weights away, and its trainer is not here")
