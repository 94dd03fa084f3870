"""The phase switch: the one place that decides what is in device memory.

*train*: trainer weights, gradients and optimizer state are resident, the rollout engine sleeps.
*rollout*: rollout weights and KV cache are resident, the optimizer (and, if asked, the parameters) are offloaded.
Calling an engine in the wrong phase raises, so a memory bug shows itself as an error with a name, not as an OOM.
"""

from __future__ import annotations

import enum
from collections.abc import Callable


class Phase(enum.Enum):
    train = "train"
    rollout = "rollout"


class PhaseSwitch:
    """Holds the current phase and runs the given actions at each change of it."""

    def __init__(self, *, enter_train: Callable[[], None], enter_rollout: Callable[[], None]) -> None:
        self.phase = Phase.train
        self._enter = {Phase.train: enter_train, Phase.rollout: enter_rollout}

    def switch(self, phase: Phase) -> None:
        """Enter `phase`; nothing happens when it is the current one."""
        if phase is not self.phase:
            self._enter[phase]()
            self.phase = phase

    def require(self, phase: Phase, what: str) -> None:
        """Raise RuntimeError unless `phase` is the current one."""
        if phase is not self.phase:
            raise RuntimeError(f"{what} needs the {phase.value} phase, but this worker is in {self.phase.value}")
